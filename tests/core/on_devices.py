"""The program that `test_devices.py` runs: estimates on several devices, reported as JSON.

`python -m tests.core.on_devices` on 8 virtual devices; with a process number and a port on 2
devices of one of 2 processes. (How many there are is for the environment to say.)
"""

import json
import math
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import traceax as tr

from ..helpers import PROBED as ESTIMATORS, PSD

N, K = 2**14, 24  # blocks of 8 columns are large: see `_LARGE_BLOCK`


# --- operators, as functions of the arrays that are sharded --------------------------------------

FUNCTION = (1 / np.arange(1.0, N + 1) ** 2, np.random.default_rng(0).standard_normal((N, 3)) / 9)


def low_rank_plus_diagonal(arrays):
    diagonal, factor = arrays
    structure = jax.ShapeDtypeStruct((N,), jnp.float64)
    return lx.FunctionLinearOperator(
        lambda v: diagonal * v + factor @ (factor.T @ v), structure, PSD
    )


DENSE = FUNCTION[1][:512] @ FUNCTION[1][:512].T + np.diag(FUNCTION[0][:512])


def dense(matrix):
    return lx.MatrixLinearOperator(matrix, PSD)


# --- what is reported ----------------------------------------------------------------------------


def gathers(text):
    """The shapes that the program gathers."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", text)
    return [[int(x) for x in shape.split(",") if x] for shape in shapes]


def sent(text):
    """The names of the collectives of a program, and how many numbers all of them return."""
    names = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    found = re.findall(rf"= (.*?) {names}(?:-start)?\(", text)
    sizes = [
        math.prod(int(x) for x in shape.split(",") if x)
        for shapes, _ in found
        for shape in re.findall(r"\w+\[([\d,]*)\]", shapes)
    ]
    return {"names": sorted({name for _, name in found}), "numbers": sum(sizes)}


def estimate(make, name, gradient=False):
    def value(arrays):
        solution = tr.trace(jax.random.key(0), make(arrays), K, ESTIMATORS[name])
        return solution.value, solution.value + solution.std_err  # which is rounded as the value is

    return jax.jit(jax.value_and_grad(value, has_aux=True) if gradient else value)


def largest_error(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)


def compare(make, arrays, specs, mesh, name, gradient=False):
    """The same estimate on all devices and on one, and the program for all."""
    sharded = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arrays, specs
    )
    program = estimate(make, name, gradient).lower(sharded).compile()
    text = program.as_text()
    expected = estimate(make, name, gradient)(jax.tree.map(jnp.asarray, arrays))
    rows = sorted({int(x) for x in re.findall(r"f64\[(\d+),\d+\]", text)})
    error = largest_error(program(sharded), expected)
    return {"error": error, "gathers": gathers(text), "rows": rows}


def data_parallel(mesh):
    """Curvature of a batch that is cut by examples, with the same parameters on all devices: its
    estimates beside its products and quadratic forms alone.
    """
    rng = np.random.default_rng(3)
    params = {"w": rng.standard_normal((6, 5)) / 2, "v": rng.standard_normal((5, 3)) / 2}
    batch = rng.standard_normal((64, 6)), rng.standard_normal((64, 3))
    vectors = jax.tree.map(lambda x: rng.standard_normal((K, *x.shape)), params)

    def put(tree, spec):
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch[0] @ params["w"]) @ params["v"] - batch[1]) ** 2)

    def of(name):
        def solve(params, batch, vectors):
            operator = tr.curvature.hessian(loss, params, batch)
            if name in ESTIMATORS:
                solution = tr.trace(jax.random.key(0), operator, K, ESTIMATORS[name])
                return solution.value, solution.std_err
            product = operator.mv if name == "mv" else partial(operator.mean, operator.form)
            return jax.vmap(product)(vectors)

        return jax.jit(solve)

    report = {}
    for name in ("mv", "quadratic_form", "hutchinson", "xtrace"):
        arguments = put(params, P()), put(batch, P("d")), put(vectors, P())
        program = of(name).lower(*arguments).compile()
        error = largest_error(program(*arguments), of(name)(params, batch, vectors))
        report[name] = {"error": error, **sent(program.as_text())}
    return report


def explicit_axes(mesh):
    """Relative errors in the mesh that `jax.make_mesh` returns, of a matrix and of curvature, under
    `jax.set_mesh` too.
    """
    rng = np.random.default_rng(5)
    params, inputs = rng.standard_normal((16, 3)) / 3, rng.standard_normal((64, 16))

    def loss(params, inputs):
        return jnp.mean(jnp.tanh(inputs @ params) ** 4)

    def trace(params, inputs):
        return tr.trace(jax.random.key(0), tr.curvature.hessian(loss, params, inputs), 10).value

    both = jax.jit(jax.value_and_grad(trace))
    expected = both(params, inputs)
    report = {"matrix": compare(dense, DENSE, P("d", None), mesh, "xtrace")["error"]}
    with jax.set_mesh(mesh):
        report["matrix, set"] = compare(dense, DENSE, P("d", None), mesh, "xtrace")["error"]
        placed = jax.device_put(inputs, NamedSharding(mesh, P("d", None)))
        whole = jax.device_put(params, NamedSharding(mesh, P()))
        report["hessian"] = largest_error(trace(whole, placed), expected[0])
        report["gradient"] = largest_error(both(whole, placed), expected)
    return report


def batches(mesh):
    """A batch of operators, one a device: inside `shard_map`, and as a `vmap` that is cut."""
    matrices = jnp.stack([jnp.asarray(DENSE[:64, :64]) * (i + 1) for i in range(8)])
    keys = jax.random.split(jax.random.key(0), 8)

    def values(keys, matrices):
        solve = jax.vmap(lambda k, a: tr.trace(k, dense(a), K, ESTIMATORS["xtrace"]).value)
        return solve(keys, matrices)

    mapped = jax.shard_map(values, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    put = jax.device_put((keys, matrices), NamedSharding(mesh, P("d")))
    program = jax.jit(values).lower(*put).compile()
    expected = values(keys, matrices)
    return {
        "shard_map": largest_error(jax.jit(mapped)(*put), expected),
        "vmap": largest_error(program(*put), expected),
        "gathers": gathers(program.as_text()),
    }


def virtual():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    cut = (P("d"), P("d", None))
    report: dict = {
        name: compare(low_rank_plus_diagonal, FUNCTION, cut, mesh, name, gradient=True)
        for name in ESTIMATORS
    }
    report["explicit axes"] = explicit_axes(jax.make_mesh((8,), ("d",)))
    report["data"] = data_parallel(mesh)
    report["batches"] = batches(mesh)
    return report


def one_of_two(process, port):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def put(x, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    arrays = jax.tree.map(put, FUNCTION, (P("d"), P("d", None)))
    value, std_err = estimate(low_rank_plus_diagonal, "xtrace")(arrays)
    return {"devices": jax.device_count(), "value": float(value), "std_err": float(std_err)}


def alone():
    value, std_err = estimate(low_rank_plus_diagonal, "xtrace")(FUNCTION)
    return {"value": float(value), "std_err": float(std_err)}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    if len(sys.argv) > 1:
        print(json.dumps(one_of_two(*map(int, sys.argv[1:]))))
    else:
        print(json.dumps({**virtual(), "alone": alone()}))
