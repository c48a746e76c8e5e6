"""The program that `test_devices.py` runs: estimates on several devices, reported as JSON.

`python -m tests.core.on_devices` on 8 virtual devices; with a process number and a port on 2
devices of one of 2 processes. (How many there are is for the environment to say.)
"""

import contextlib
import io
import json
import logging
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from traceax._linalg.matrix_product import matrix_product
from traceax._linalg.sharded.tsqr import partitioned, tall_qr_rule

import traceax as tr
from traceax._linalg import factorisations

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
PSD = lx.positive_semidefinite_tag
N, K = 1024, 24
ESTIMATORS = {
    "hutchinson": tr.HutchinsonEstimator(),
    "hutch++": tr.HutchPlusPlusEstimator(),
    "xtrace": tr.XTraceEstimator(),
    "xnystrace": tr.XNysTraceEstimator(),
}


def structure(shape=(N,)):
    return jax.ShapeDtypeStruct(shape, jnp.float64)


# --- operators, as functions of the arrays that are sharded --------------------------------------

FUNCTION = (1 / np.arange(1.0, N + 1) ** 2, np.random.default_rng(0).standard_normal((N, 3)) / 9)


def low_rank_plus_diagonal(arrays):
    diagonal, factor = arrays
    return lx.FunctionLinearOperator(
        lambda v: diagonal * v + factor @ (factor.T @ v), structure(), PSD
    )


TREE = {
    "a": np.linspace(0.1, 1, 512).reshape(16, 32),
    "b": np.linspace(1, 2, 8 * 3).reshape(8, 3),
    "c": np.linspace(0.5, 1, 5 * 64).reshape(5, 64),
}
TREE_SPECS = {"a": P("d", None), "b": P("d", None), "c": P(None, "d")}


def coupled_leaves(tree):
    def mv(v):
        pairs = zip(jax.tree.leaves(v), jax.tree.leaves(tree), strict=True)
        shared = sum(jnp.sum(x * y) for x, y in pairs)
        return jax.tree.map(lambda w, p: p * p * w + 0.01 * shared * p, v, tree)

    return lx.FunctionLinearOperator(mv, jax.tree.map(lambda x: structure(x.shape), tree), PSD)


def of_diagonal(diagonal):
    leaf = jax.ShapeDtypeStruct(diagonal.shape, diagonal.dtype)
    operator = lx.FunctionLinearOperator(lambda v: diagonal * v, leaf)
    return tr.trace(jax.random.key(0), operator, 8, ESTIMATORS["xtrace"]).value


DENSE = (FUNCTION[1] @ FUNCTION[1].T + np.diag(FUNCTION[0]))[: N // 2, : N // 2]


def dense(matrix):
    return lx.MatrixLinearOperator(matrix, PSD)


def ring(mesh):
    """A matrix cut by rows, whose product sends the parts of the vectors around."""
    size = mesh.size

    def multiply(rows, v):
        index = jax.lax.axis_index("d")
        width = v.shape[0]

        def step(i, carry):
            total, v = carry
            columns = jax.lax.dynamic_slice_in_dim(rows, (index + i) % size * width, width, axis=1)
            v_next = jax.lax.ppermute(v, "d", [((j + 1) % size, j) for j in range(size)])
            return total + columns @ v, v_next

        start = jax.lax.pcast(jnp.zeros(rows.shape[0]), "d", to="varying")
        return jax.lax.fori_loop(0, size, step, (start, v))[0]

    def make(matrix):
        product = jax.shard_map(multiply, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"))
        return lx.FunctionLinearOperator(
            lambda v: product(matrix, v), structure(matrix.shape[:1]), PSD
        )

    return make


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
        return solution.value, solution.std_err

    return jax.jit(jax.value_and_grad(value, has_aux=True) if gradient else value)


def compare(make, arrays, specs, mesh, name, gradient=False, other=None):
    """The same estimate on all devices and on one, and the program for all."""
    sharded = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arrays, specs
    )
    program = estimate(make, name, gradient).lower(sharded).compile()
    text = program.as_text()
    expected = estimate(other or make, name, gradient)(jax.tree.map(jnp.asarray, arrays))
    pairs = zip(jax.tree.leaves(program(sharded)), jax.tree.leaves(expected), strict=True)
    errors = [float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs]
    blocks = set(re.findall(r"\w+\[(\d+),\d+\]", text))
    return {"error": max(errors), "gathers": gathers(text), "rows": sorted(map(int, blocks))}


def factors(block, mesh, spec, qr=factorisations.qr):
    """How good a factorisation of a sharded block is, in units of rounding."""
    put = jax.lax.with_sharding_constraint

    @jax.jit
    def factorise(block):
        return qr(put(block, NamedSharding(mesh, spec)))

    program = factorise.lower(block).compile()
    q, r = (np.asarray(x) for x in program(block))
    eps = np.finfo(block.dtype).eps
    size = max(np.linalg.norm(block), 1e-300)
    defect = np.max(np.abs(q.conj().T @ q - np.eye(q.shape[1])))
    return [float(defect / eps), float(np.linalg.norm(q @ r - block) / size / eps)]


def product_error(matrix, block, mesh, spec):
    """How far the product with a sharded matrix is from that with a whole one."""

    def product(matrix):
        return matrix_product(
            jax.lax.with_sharding_constraint(matrix, NamedSharding(mesh, spec)), block
        )

    found, expected = np.asarray(jax.jit(product)(matrix)), matrix @ block
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


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
            return jax.vmap(getattr(operator, name))(vectors)

        return jax.jit(solve)

    report = {}
    for name in ("mv", "quadratic_form", "hutchinson", "hutch++", "xtrace"):
        program = of(name).lower(put(params, P()), put(batch, P("d")), put(vectors, P())).compile()
        found = program(put(params, P()), put(batch, P("d")), put(vectors, P()))
        pairs = zip(
            jax.tree.leaves(found), jax.tree.leaves(of(name)(params, batch, vectors)), strict=True
        )
        errors = [float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs]
        report[name] = {"error": max(errors), **sent(program.as_text())}
    return report


def network(params, inputs, cut=None):
    """A network with what JAX compiles apart: a loop, a custom derivative, a rematerialisation."""
    hidden = jnp.tanh(inputs @ params["w"])
    if cut == "constraint":
        hidden = jax.lax.with_sharding_constraint(hidden, P("d", None))
    elif cut == "reshard":
        hidden = jax.sharding.reshard(hidden, P("d", None))
    elif cut == "out_sharding":
        hidden = jnp.dot(hidden, jnp.eye(5), out_sharding=P("d", None))

    @jax.checkpoint
    def layer(hidden, matrix):
        return jax.nn.relu(hidden @ matrix) + hidden, None

    return jax.lax.scan(layer, hidden, params["layers"])[0] @ params["v"]


def fit(params, inputs, labels, cut=None):
    return jnp.mean((jax.nn.log_softmax(network(params, inputs, cut)) - labels) ** 2)


def square(outputs, inputs, labels):
    return jnp.mean((outputs - labels) ** 2)


def explicit_cases(params, batch, cut=None):
    """Numbers that a mesh must not change, by name; `cut`: how the network names its axes."""
    key, hessian = jax.random.key(0), tr.curvature.hessian
    tracker, factory = tr.Tracker(), tr.curvature.of(fit)

    def value(operator, **options):
        return tr.trace(key, operator, **(options or {"k": 10})).value

    def of_model(params, inputs, labels):
        return network(params, inputs)

    def kernel():
        matrix = tr.KernelLinearOperator(lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2)), batch[0])
        noise = 0.1 * lx.IdentityLinearOperator(structure((64,)))
        return tr.gaussian_log_density(key, batch[1][:, 0], matrix + noise, 20).value

    def function():
        operator = lx.FunctionLinearOperator(
            lambda v: batch[0] @ (batch[0].T @ v) + jnp.where(v > 0, v, v), structure((64,))
        )
        return value(operator, k=20)

    def tracked():
        state, seen = tracker.init(factory(params, *batch), 10), []
        for step in range(3):
            operator = factory(params, *batch)
            state, solution = tracker.update(jax.random.key(step), operator, state)
            seen.append(solution.value)
        return jnp.stack(seen)

    def gradient(params, inputs, labels):
        return value(hessian(fit, params, inputs, labels))

    gauss_newton = tr.curvature.gauss_newton(of_model, square, params, *batch)
    cases = {
        "hessian": lambda: value(hessian(fit, params, *batch)),
        "reverse": lambda: value(hessian(fit, params, *batch, mode="reverse")),
        "hutchinson": lambda: value(
            hessian(fit, params, *batch), k=10, estimator=ESTIMATORS["hutchinson"]
        ),
        "gauss_newton": lambda: value(gauss_newton),
        "factory": lambda: value(factory(params, *batch)),
        "closure": lambda: value(hessian(lambda params: fit(params, *batch), params)),
        "gradient": lambda: jax.jit(jax.grad(gradient))(params, *batch)["w"],
        "product": lambda: hessian(fit, params, *batch).mv(params)["w"],
        "diagonal": lambda: tr.diagonal(key, gauss_newton, 10).value["w"],
        "tolerance": lambda: value(gauss_newton, rtol=0.3),
        "density": lambda: tr.spectral_density(key, gauss_newton, 20, jnp.arange(4.0)).value,
        "tracker": tracked,
        "kernel": kernel,
        "function": function,
    }
    named = {
        name: lambda name=name: value(hessian(lambda *args: fit(*args, cut=name), params, *batch))
        for name in ("constraint", "reshard", "out_sharding")
    }
    return {**cases, **named} if cut else cases


class Compilations(logging.Handler):
    """What JAX says that it compiles."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def emit(self, record):
        self.count += record.getMessage().startswith("Compiling")


def compilations(fn):
    logger, handler = logging.getLogger("jax"), Compilations()
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    with jax.log_compiles():
        fn()
    logger.removeHandler(handler)
    logger.propagate = propagates
    return handler.count


def explicit_axes(mesh):
    """The relative errors in a mesh with explicit axes, under `jax.set_mesh` and inside of
    `jax.shard_map`, and how often a loop compiles after its first round.
    """
    rng = np.random.default_rng(5)
    shapes = {"w": (16, 5), "layers": (3, 5, 5), "v": (5, 3)}
    params = {name: jnp.asarray(rng.standard_normal(shape)) / 3 for name, shape in shapes.items()}
    batch = tuple(jnp.asarray(rng.standard_normal((64, size))) for size in (16, 3))
    expected = {name: fn() for name, fn in explicit_cases(params, batch).items()}
    report = {}
    with jax.set_mesh(mesh):
        cut = {"whole": P(), "cut": P("d", None)}
        placed = jax.device_put(batch, NamedSharding(mesh, P("d")))
        for how, spec in cut.items():
            specs = {name: spec if name == "w" else P() for name in params}
            moved = {
                name: jax.device_put(x, NamedSharding(mesh, specs[name]))
                for name, x in params.items()
            }
            cases = explicit_cases(moved, placed, cut=True)
            some = ("hessian", "gradient", "product", "diagonal", "tracker")
            for name in some if how == "cut" else cases:
                like = np.asarray(expected.get(name, expected["hessian"]))
                error = np.max(np.abs(np.asarray(cases[name]()) - like)) / np.max(np.abs(like))
                report[f"{name}, {how}"] = float(error)
        factory = tr.curvature.of(fit)

        def look():
            tr.trace(jax.random.key(0), factory(params, *placed), 10)

        look()
        report["compilations"] = compilations(look)

    def local(inputs, labels):
        operator = tr.curvature.hessian(fit, params, inputs, labels)
        return tr.trace(jax.random.key(0), operator, 10).value[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    parts = [tuple(x[8 * i : 8 * i + 8] for x in batch) for i in range(8)]
    alone = np.concatenate([local(*part) for part in parts])
    report["shard_map"] = float(np.max(np.abs(jax.jit(mapped)(*placed) / alone - 1)))
    return report


def virtual():
    auto, explicit = AxisType.Auto, AxisType.Explicit
    mesh = jax.make_mesh((8,), ("d",), axis_types=(auto,))
    plane = jax.make_mesh((4, 2), ("x", "y"), axis_types=(auto, auto))
    cut = (P("d"), P("d", None))
    report = {}
    for name in ESTIMATORS:
        report[name] = compare(low_rank_plus_diagonal, FUNCTION, cut, mesh, name, gradient=True)
    other = jax.make_mesh((8,), ("d",), axis_types=(explicit,))
    report["explicit"] = compare(dense, DENSE, P("d", None), other, "xtrace")
    with jax.set_mesh(other):
        report["set mesh"] = compare(dense, DENSE, P("d", None), other, "xtrace")
    report["explicit axes"] = explicit_axes(other)
    report["dense"] = compare(dense, DENSE, P("d", None), mesh, "xtrace")
    report["ring"] = compare(ring(mesh), DENSE, P("d", None), mesh, "xtrace", other=dense)
    report["tree"] = compare(coupled_leaves, TREE, TREE_SPECS, mesh, "hutchinson", gradient=True)
    report["tree-xtrace"] = compare(coupled_leaves, TREE, TREE_SPECS, mesh, "xtrace")
    report["data"] = data_parallel(mesh)

    rng = np.random.default_rng(1)
    tall = rng.standard_normal((300, 9))
    low = tall[:, :3] @ rng.standard_normal((3, 9))
    blocks = {
        "even": (tall[:296], mesh, P("d", None)),
        "uneven": (tall, mesh, P("d", None)),
        "few rows": (tall[:20], mesh, P("d", None)),
        "two axes": (tall.astype(np.float32), plane, P(("x", "y"), None)),
        "columns too": (tall[:, :8] + 1j * low[:, :8], plane, P("x", "y")),
        "low rank": (low, mesh, P("d", None)),
        "zero": (np.zeros((300, 9)), mesh, P("d", None)),
    }
    stack = factorisations._in_turn(factorisations._sketched_qr)
    rule = "b n m -> b n m, b k l"
    sketched = partitioned("other_qr", stack, tall_qr_rule(stack), rule, whole=("m", "k", "l"))
    blocks["sketched"] = (tall, mesh, P("d", None), sketched)
    report["qr"] = {name: factors(*arguments) for name, arguments in blocks.items()}

    # Axes out of order: a cycle of three is told from its inverse; two axes leave a gap.
    cube = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(auto, auto, auto))
    for axes in (("z", "x"), ("y", "z", "x")):
        report["qr"]["".join(axes)] = factors(tall, cube, P(axes, None))

    square, block = rng.standard_normal((300, 300)), rng.standard_normal((300, 5))
    long, wide = rng.standard_normal((2000, 2000)), rng.standard_normal((2000, 50))
    cuts = {
        "rows": (square[:296, :296], block[:296], mesh, P("d", None)),
        "columns": (square[:296, :296], block[:296], mesh, P(None, "d")),
        "both": (square[:296, :296], block[:296], plane, P("x", "y")),
        "uneven rows": (square, block, mesh, P("d", None)),
        "uneven columns": (square, block, mesh, P(None, "d")),
        "uneven both": (square[:297, :297], block[:297], plane, P("x", "y")),
        "two axes": (square[:296, :296], block[:296], plane, P(("x", "y"), None)),
        "transposed": (long, wide, mesh, P("d", None)),
    }
    report["products"] = {name: product_error(*arguments) for name, arguments in cuts.items()}

    # The page of the documentation, whose last program takes a model as one vector.
    page: dict = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n".join(blocks), PAGE.name, "exec"), page)
    program = page["of_model"].lower(jax.random.key(0), page["params"]).compile()
    report["page"] = gathers(program.as_text())

    # More rows than an int32 can count: compiled, not run.
    sharding = NamedSharding(mesh, P("d"))
    many = jax.ShapeDtypeStruct((2**33,), np.float32, sharding=sharding)
    program = jax.jit(of_diagonal).lower(many).compile()
    report["many"] = gathers(program.as_text())

    # A batch of operators, one a device: inside `shard_map`, and as a `vmap` that is cut.
    matrices = jnp.stack([jnp.asarray(DENSE[:64, :64]) * (i + 1) for i in range(8)])
    keys = jax.random.split(jax.random.key(0), 8)

    def values(keys, matrices):
        solve = jax.vmap(lambda k, a: tr.trace(k, dense(a), K, ESTIMATORS["xtrace"]).value)
        return solve(keys, matrices)

    mapped = jax.shard_map(values, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    partly = jax.shard_map(values, mesh=plane, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    put = jax.device_put((keys, matrices), NamedSharding(mesh, P("d")))
    program = jax.jit(values).lower(*put).compile()
    expected = values(keys, matrices)
    fns = {"shard_map": jax.jit(mapped), "partly": jax.jit(partly), "vmap": program}
    for name, fn in fns.items():
        found = fn(keys, matrices) if name == "partly" else fn(*put)
        report[name] = {"error": float(np.max(np.abs(found / expected - 1)))}
    report["vmap"]["gathers"] = gathers(program.as_text())
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
