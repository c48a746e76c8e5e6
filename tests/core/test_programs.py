"""What a compiled program is found again by: everything that it depends on, and no array."""

import functools
import gc
import itertools
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._core import programs

from .test_closures import ESTIMATOR, KEY, STRUCTURE, N, traces_of

MATRIX = jax.device_put(np.random.default_rng(0).standard_normal((N, N)))

# --- no two programs under one key ---------------------------------------------------------------


class Scaled(eqx.Module):
    """A module with an array, a static field, and a method."""

    matrix: jax.Array
    power: float = eqx.field(static=True)

    def mv(self, v):
        return self.power * (self.matrix @ v)


class Callable:
    """An ordinary object that is called."""

    def __init__(self, matrix):
        self.matrix = matrix

    def __call__(self, v):
        return self.matrix @ v


def multiply(matrix, v):
    return matrix @ v


def with_jvp(matrix):
    @jax.custom_jvp
    def product(v):
        return matrix @ v

    product.defjvp(lambda primals, tangents: (product(*primals), matrix @ tangents[0]))
    return product


def with_vjp(matrix):
    @jax.custom_vjp
    def product(v):
        return matrix @ v

    product.defvjp(lambda v: (product(v), None), lambda _, ct: (matrix.T @ ct,))
    return product


def in_scan(matrix):
    def step(v, factor):
        return factor * jax.jit(lambda v: matrix @ v)(v), v[0]

    return lambda v: jax.lax.scan(step, v, jnp.array([2.0, 0.5, 1.0])[:1] / 2)[0]


def in_while(matrix):
    def body(carry):
        count, v = carry
        return count + 1, jax.jit(lambda v: matrix @ v)(v)

    return lambda v: jax.lax.while_loop(lambda carry: carry[0] < 1, body, (0, v))[1]


def in_cond(matrix):
    inner = jax.jit(lambda v: matrix @ v)
    return lambda v: jax.lax.cond(v[0] > 0, inner, lambda v: matrix @ v, v)


def in_switch(matrix):
    branches = [jax.jit(lambda v, i=i: (i + 1) * (matrix @ v) / (i + 1)) for i in range(3)]
    return lambda v: jax.lax.switch(jnp.asarray(2), branches, v)


def nested_jit(matrix):
    half = matrix / 2
    inner = jax.jit(lambda v: half @ v)
    return jax.jit(lambda v: inner(v) + jax.jit(lambda v: inner(v))(v))


# What makes a function v -> M v of a matrix M, in all the ways in which M may be held.
HOLDERS = {
    "closure": lambda m: lambda v: m @ v,
    "numpy closure": lambda m: lambda v, m=np.asarray(m): m @ v,
    "jit": lambda m: jax.jit(lambda v: m @ v),
    "jit of numpy": lambda m: jax.jit(functools.partial(multiply, np.asarray(m))),
    "nested jit": nested_jit,
    "jit in a scan": lambda m: lambda v: 1.0 * in_scan(m)(v),
    "jit in a while loop": in_while,
    "jit in a cond": in_cond,
    "jit in a switch": in_switch,
    "jit in a checkpoint": lambda m: jax.checkpoint(jax.jit(lambda v: m @ v)),
    "jit in a vmap": lambda m: lambda v: jax.vmap(jax.jit(lambda row: row * v))(m).sum(1),
    "partial": lambda m: functools.partial(multiply, m),
    "jitted partial": lambda m: jax.jit(functools.partial(multiply, m)),
    "method": lambda m: Scaled(m, 1.0).mv,
    "jitted method": lambda m: eqx.filter_jit(Scaled(m, 1.0).mv),
    "object": Callable,
    "custom_jvp": with_jvp,
    "jitted custom_jvp": lambda m: jax.jit(with_jvp(m)),
    "custom_vjp": with_vjp,
    "jitted custom_vjp": lambda m: jax.jit(with_vjp(m)),
    "linear_transpose": lambda m: (
        lambda v: jax.linear_transpose(jax.jit(lambda v: m.T @ v), v)(v)[0]
    ),
    "callback": lambda m: (
        lambda v: jax.pure_callback(
            lambda v, m=np.asarray(m): m @ np.asarray(v), v, v, vmap_method="sequential"
        )
    ),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_other_constants_are_another_operator(holder):
    """Freshly made, of the same structure, converted or not: each has its own trace."""
    moved = np.asarray(MATRIX) + np.diag(np.arange(N) == 0)
    for matrix in map(jnp.asarray, (MATRIX, moved, MATRIX)):
        for convert in (True, False):
            function = HOLDERS[holder](matrix)
            operator = lx.FunctionLinearOperator(function, STRUCTURE, closure_convert=convert)
            value = tr.trace(KEY, operator, N).value
            np.testing.assert_allclose(value, np.trace(matrix), rtol=1e-12, atol=1e-12)


def power_of(power):
    return lambda v: v * power


# Functions of one structure that are told apart by something that is no array.
PROGRAMS = {
    "2": power_of(2),
    "2.0": power_of(2.0),
    "0.0": lambda v: jnp.where(jnp.signbit(v * 0.0), 7 * v, v),
    "-0.0": lambda v: jnp.where(jnp.signbit(v * -0.0), 7 * v, v),
    "nan": lambda v: jnp.where(jnp.isnan(power_of(float("nan"))(v)), 5 * v, v),
    "static 1": lambda v: Scaled(jnp.eye(N), 1).mv(v),
    "static 3.0": lambda v: Scaled(jnp.eye(N), 3.0).mv(v),
    "jit 3": jax.jit(power_of(3)),
    "jit 4": jax.jit(power_of(4)),
    "add": lambda v: v + v * jnp.full(N, 0.5),
    "mul": lambda v: v * v.size * jnp.full(N, 0.5),
    "loop of 3": lambda v: jax.lax.fori_loop(0, 3, lambda _, v: 2 * v, v),
    "loop of 4": lambda v: jax.lax.fori_loop(0, 4, lambda _, v: 2 * v, v),
    "a - b": lambda v: jnp.full(N, 2.0) * v - jnp.full(N, 5.0) * v,
    "b - a": lambda v: jnp.full(N, 5.0) * v - jnp.full(N, 2.0) * v,
    "float32": lambda v: v.astype(jnp.float32).astype(v.dtype) * 11,
    "bfloat16": lambda v: v.astype(jnp.bfloat16).astype(v.dtype) * 11,
}


def test_programs_that_differ_in_python_values_are_told_apart():
    """In one process, in any order, twice: static keys that are equal belong to equal programs."""
    kept = {}
    expected = jax.jit(
        lambda eye: {name: jnp.trace(jax.vmap(fn)(eye)) for name, fn in PROGRAMS.items()}
    )(np.eye(N))
    for name, function in [*PROGRAMS.items(), *reversed(PROGRAMS.items())]:
        operator = lx.FunctionLinearOperator(function, STRUCTURE)
        value = tr.trace(KEY, operator, N).value
        np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)
        kept[name] = programs.closed_function(function, STRUCTURE).program
    for (name, a), (other, b) in itertools.combinations(kept.items(), 2):
        assert a != b or str(a.value) == str(b.value), (name, other)


def test_static_values_are_compared_by_type_and_bits():
    """Python finds 1, 1.0 and True equal, -0.0 and 0.0 too, and NaN no NaN."""
    values = [1, 1.0, True, 0.0, -0.0, 1 + 0j, complex(1, -0.0), np.float32(1), np.float64(1), "1"]
    values += [np.arange(3), np.arange(3.0), (1, 2), [1, 2], (1.0, 2), {"a": 1}, {"a": 1.0}, None]
    values += [jax.tree.structure(Scaled(None, power)) for power in (1, 1.0, True, -0.0, 0.0)]
    for i, j in itertools.product(range(len(values)), repeat=2):
        a, b = programs.Static(values[i]), programs.Static(values[j])
        assert (a == b) == (i == j), (values[i], values[j])
        assert a != b or hash(a) == hash(b)
    nan = float("nan")
    assert programs.Static(nan) == programs.Static(float("nan"))


def test_numbers_in_front_of_an_operator_compile_once():
    """A Python number that lineax keeps as it is would make a program of its own."""
    base = lx.FunctionLinearOperator(lambda v: MATRIX @ v, STRUCTURE)

    def values():
        return [
            tr.trace(KEY, wrapped(base, number), 3, ESTIMATOR).value
            for number in (2.0, 3.0, 5, np.float64(0.5))
            for wrapped in (lx.MulLinearOperator, lx.DivLinearOperator)
        ]

    counts, found = traces_of(values)
    assert counts <= 6  # a multiple, a quotient; a float, an integer, a number of NumPy's
    again, _ = traces_of(lambda: [tr.trace(KEY, x * base, 3, ESTIMATOR) for x in (7.0, 9)])
    assert again == 0
    one = tr.trace(KEY, base, 3, ESTIMATOR).value
    factors = [2, 1 / 2, 3, 1 / 3, 5, 1 / 5, 0.5, 2]
    np.testing.assert_allclose(found, np.array(factors) * one, rtol=1e-12)


# --- no array in a key, none kept alive ----------------------------------------------------------

# Arrays that are compared by identity: in rules of derivatives, and inside of control flow.
NOT_HOISTED = {
    *("custom_jvp", "jitted custom_jvp", "custom_vjp", "jitted custom_vjp", "callback"),
    *("jit in a scan", "jit in a while loop", "jit in a cond", "jit in a switch"),
    "jit in a checkpoint",
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_no_array_is_part_of_a_key(holder):
    matrices = MATRIX, 2 * MATRIX
    closed = [programs.closed_function(HOLDERS[holder](m), STRUCTURE) for m in matrices]
    hoisted = holder not in NOT_HOISTED
    assert programs.is_plain(closed[0].program) == hoisted
    assert (closed[0].program == closed[1].program) == hoisted
    assert programs.is_plain([closed[0]]) is False  # the constants
    hash(closed[0].program)


def test_what_is_plain_holds_no_array_and_cannot_change():
    """Values and whether a program that was compiled with them may be kept for good."""
    matrix, scale = MATRIX, 2.0
    for value, expected in (
        (jnp.tanh, True),
        (lambda v: 2 * v, True),
        (lambda v: scale * v, True),
        (lambda v: matrix @ v, False),
        (lambda v: (lambda u: MATRIX @ u)(v), False),  # a global
        (lambda v, m=matrix: m @ v, False),
        (functools.partial(multiply, matrix), False),
        (jax.jit(lambda v: matrix @ v), False),
        (Scaled(matrix, 1.0).mv, False),
        (Callable(2.0).__call__, False),  # it may change
        ([1, "a", None, {"b": (2.0, jnp.float32)}], True),
        ({"c": [np.arange(3)]}, False),
        (jax.tree.structure(Scaled(None, 1.0)), True),
        (jax.tree.structure(Scaled(None, Callable(1.0))), False),
    ):
        assert programs.is_plain(value) == expected, value


CALLS = {
    "trace": lambda op: tr.trace(KEY, op, 3),
    "tolerance": lambda op: tr.trace(KEY, op, rtol=0.1),
    "gradient": lambda op: jax.grad(lambda s: tr.trace(KEY, s * op, 3).value)(1.0),
}


@pytest.mark.parametrize(
    ("holder", "call"), [("closure", "trace"), ("jit", "gradient"), ("object", "tolerance")]
)
def test_operators_of_the_past_are_not_kept(holder, call):
    """Of six eager calls with fresh operators, at most one array is alive afterwards. (Arrays that
    are not hoisted are kept by JAX, which caches how it batches the jaxprs that they are in.)
    """
    alive = []
    for i in range(6):
        matrix = jnp.asarray(np.eye(N) * (i + 1.0))
        alive.append(weakref.ref(matrix))
        # (No tag: lineax asks those with one for their outputs, and Equinox keeps whom it asks.)
        operator = lx.FunctionLinearOperator(HOLDERS[holder](matrix), STRUCTURE)
        CALLS[call](operator)
        del matrix, operator
    gc.collect()
    assert sum(reference() is not None for reference in alive) <= 1


# --- functions with rules of their own -----------------------------------------------------------


@pytest.mark.parametrize("hold", [jnp.asarray, float])
def test_rules_that_differ_in_what_they_hold_are_told_apart(hold):
    """The same code, other cells; the same values, other derivatives."""

    def slope(factor):
        held = hold(factor)

        @jax.custom_jvp
        def same(x):
            return 1.0 * x

        same.defjvp(lambda primals, tangents: (same(*primals), held * tangents[0]))

        def trace(s):
            operator = lx.FunctionLinearOperator(lambda v: same(s) * v, STRUCTURE)
            return tr.trace(KEY, operator, 2, ESTIMATOR).value

        return jax.grad(trace)(1.0)

    slopes = [slope(2.0), slope(3.0), slope(2.0)]
    np.testing.assert_allclose(slopes, [12.0, 18.0, 12.0], rtol=1e-13)


# --- traced values -------------------------------------------------------------------------------


def test_ranks_are_combined_whatever_the_user_allows():
    """Also where a factorisation is lowered, long after it was traced."""
    size = jax.ShapeDtypeStruct((83,), jnp.float64)  # of no other test
    weights = jnp.arange(1.0, 84.0)

    def trace(key):
        operator = lx.FunctionLinearOperator(lambda v: weights * v, size)
        return tr.trace(key, operator, 40, tr.XTraceEstimator()).value

    with jax.numpy_rank_promotion("raise"):
        value = jax.jit(trace)(KEY)
    assert abs(value - 83 * 42) < 0.2 * 83 * 42


# --- vmap over an axis of a mesh -----------------------------------------------------------------


@pytest.mark.parametrize("batched", ["key", "operator"])
def test_vmap_keeps_the_axis_of_the_mesh(batched):
    """`spmd_axis_name` cuts the batch; constraints inside the operator must say so."""
    mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def trace(key, scale):
        def mv(v):
            return jax.lax.with_sharding_constraint(scale * v, sharding)

        operator = lx.FunctionLinearOperator(mv, STRUCTURE)
        return tr.trace(key, operator, 2, tr.HutchinsonEstimator()).value

    cases = {
        "key": ((0, None), (jr.split(KEY, 4), 2.0), np.full(4, 2.0)),
        "operator": ((None, 0), (KEY, np.arange(1.0, 5.0)), np.arange(1.0, 5.0)),
    }
    axes, arguments, scales = cases[batched]
    lowered = jax.jit(jax.vmap(trace, axes, spmd_axis_name="b")).lower(*arguments)
    assert '"b"' in lowered.as_text()
    np.testing.assert_allclose(lowered.compile()(*arguments), N * scales)
