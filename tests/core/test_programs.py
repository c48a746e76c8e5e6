"""What a compiled program is found again by: everything that it depends on, and no array."""

import ast
import functools
import gc
import itertools
import weakref
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import traceax as tr
from traceax._core import primitive, programs
from traceax._operators.block_operator import BlockOperator
from traceax._operators.checks import as_operator
from traceax._operators.width import batch_width, in_batches

from ..helpers import register_tags, variant
from .test_closures import ESTIMATOR, KEY, traces_of

N = 6
MATRIX = jnp.asarray(np.random.default_rng(0).standard_normal((N, N)))
SOURCES = sorted((Path(__file__).parents[2] / "traceax").rglob("*.py"))


def structure(dtype=jnp.float64, shape=(N,)):
    return jax.ShapeDtypeStruct(shape, dtype)


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


@pytest.mark.parametrize("convert", [True, False], ids=["converted", "as it is"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_other_constants_are_another_operator(holder, convert):
    """Freshly made, of the same structure: each has its own trace."""
    moved = np.asarray(MATRIX) + np.diag(np.arange(N) == 0)
    for matrix in map(jnp.asarray, (MATRIX, 3 * np.asarray(MATRIX), moved, MATRIX)):
        function = HOLDERS[holder](matrix)
        operator = lx.FunctionLinearOperator(function, structure(), closure_convert=convert)
        value = tr.trace(KEY, operator, N).value
        expected = np.trace(matrix)
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12, err_msg=holder)


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
    "float32": lambda v: v.astype(jnp.float32).astype(v.dtype) * 11,
    "bfloat16": lambda v: v.astype(jnp.bfloat16).astype(v.dtype) * 11,
}


def test_programs_that_differ_in_python_values_are_told_apart():
    """In one process, in any order, twice: static keys that are equal belong to equal programs."""
    kept = {}
    for name, function in [*PROGRAMS.items(), *reversed(PROGRAMS.items())]:
        operator = lx.FunctionLinearOperator(function, structure())
        expected = sum(np.asarray(function(row))[i] for i, row in enumerate(jnp.eye(N)))
        value = tr.trace(KEY, operator, N).value
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12, err_msg=name)
        converted = programs.closed_functions(operator).fn
        if isinstance(converted, programs.ClosedFunction):
            kept[name] = converted.program
    for (name, a), (other, b) in itertools.combinations(kept.items(), 2):
        if a == b:
            text = [str(p.jaxpr) for p in (a, b)]
            assert text[0] == text[1], (name, other)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.complex64, jnp.complex128])
def test_other_dtypes_are_another_operator(dtype):
    matrix = MATRIX.astype(dtype)
    operator = lx.FunctionLinearOperator(jax.jit(lambda v: matrix @ v), structure(dtype))
    solution = tr.trace(KEY, operator, N)
    assert solution.value.dtype == dtype
    np.testing.assert_allclose(solution.value, jnp.trace(matrix), rtol=1e-5)


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
    base = lx.FunctionLinearOperator(lambda v: MATRIX @ v, structure())

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


def arrays_in(value, seen):
    """Every array that a static key holds."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, jax.Array | np.ndarray):
        return [value] if value.ndim else []
    if programs.is_jaxpr(value):
        inner = [list(equation.params.values()) for equation in value.eqns]
        literals = [x.val for e in value.eqns for x in e.invars if hasattr(x, "val")]
        inner += [list(getattr(value, "consts", ())), literals]
    elif isinstance(value, programs.Static):
        inner = [value.value]
    elif isinstance(value, programs.Program | programs._Inner):
        inner = [value.jaxpr]
    elif isinstance(value, tuple | list):
        inner = list(value)
    else:
        inner = []
    return [x for item in inner for x in arrays_in(item, seen)]


NOT_CONVERTED = {"custom_jvp", "jitted custom_jvp", "custom_vjp", "jitted custom_vjp", "callback"}


@pytest.mark.parametrize("holder", [name for name in HOLDERS if name not in NOT_CONVERTED])
def test_no_array_is_part_of_a_key(holder, monkeypatch):
    seen = []
    original = primitive._Params
    monkeypatch.setattr(
        primitive, "_Params", lambda *args: seen.append(original(*args)) or seen[-1]
    )
    operator = lx.FunctionLinearOperator(HOLDERS[holder](MATRIX), structure())
    tr.trace(KEY, operator, 3, tr.HutchinsonEstimator())
    assert seen
    for params in seen:
        assert params.held.level == programs.NOTHING
        assert not arrays_in(params.static, set())
        hash(params)


CALLS = {
    "trace": lambda op: tr.trace(KEY, op, 3),
    "tolerance": lambda op: tr.trace(KEY, op, rtol=0.1),
    "diagonal": lambda op: tr.diagonal(KEY, op, 3),
    "block_traces": lambda op: tr.block_traces(KEY, op, 3),
    "gradient": lambda op: jax.grad(lambda s: tr.trace(KEY, s * op, 3).value)(1.0),
}


@pytest.mark.parametrize(
    ("holder", "call"),
    [
        *((holder, "trace") for holder in ("closure", "jit in a scan", "as it is", "global")),
        *(("jit", call) if call == "gradient" else variant("jit", call) for call in CALLS),
        ("as it is", "gradient"),
        ("global", "tolerance"),
    ],
)
def test_operators_of_the_past_are_not_kept(holder, call):
    """Of six eager calls with fresh operators, at most one array is alive afterwards."""
    held = []
    for i in range(6):
        matrix = jnp.asarray(np.eye(N) * (i + 1.0))
        held.append(weakref.ref(matrix))
        if holder == "global":
            globals()["CHANGING"], function = matrix, lambda v: changing(v)
        else:
            function = HOLDERS["closure" if holder == "as it is" else holder](matrix)
        convert = holder != "as it is"
        # (No tag: lineax asks those with one for their outputs, and Equinox keeps whom it asks.)
        operator = lx.FunctionLinearOperator(function, structure(), closure_convert=convert)
        CALLS[call](operator)
        del matrix, function, operator
    globals()["CHANGING"] = None
    gc.collect()
    assert sum(reference() is not None for reference in held) <= 1


CHANGING = None


def changing(v):
    return CHANGING @ v


def test_a_global_that_changes_is_seen():
    """As by a product with the operator itself, outside `jit`."""
    for factor in (1.0, 2.0):
        globals()["CHANGING"] = factor * MATRIX
        operator = lx.FunctionLinearOperator(changing, structure())
        np.testing.assert_allclose(
            tr.trace(KEY, operator, N).value, factor * jnp.trace(MATRIX), rtol=1e-12
        )


# --- functions with rules of their own -----------------------------------------------------------


def relu_loss(params, inputs):
    return jnp.mean(jax.nn.relu(inputs @ params["w"]) ** 2) + jnp.sum(jax.nn.relu(params["b"]))


def test_an_eager_loop_over_a_relu_network_compiles_once():
    """The rule of a `jax.custom_jvp` is an object of its own whenever it is traced."""
    inputs = jr.normal(jr.key(2), (5, 3))

    def estimate(scale, loss):
        params = {"w": scale * jnp.ones((3, 2)), "b": scale * jnp.arange(2.0)}
        operator = tr.curvature.hessian(loss, params, inputs)
        return tr.trace(KEY, operator, 3, ESTIMATOR).value

    def batched(params, inputs):
        return jnp.mean(jax.vmap(lambda x: relu_loss(params, x[None]))(inputs))

    def rematerialised(params, inputs):
        @jax.checkpoint
        def layer(x, w):
            return jax.nn.relu(x @ w), None

        weights = jnp.stack([params["w"] @ params["w"].T] * 2)
        return relu_loss(params, jax.lax.scan(layer, inputs, weights)[0])

    for loss in (relu_loss, batched, rematerialised):
        first, _ = traces_of(lambda loss=loss: estimate(1.0, loss))
        again, _ = traces_of(lambda loss=loss: [estimate(s, loss) for s in (2.0, 3.0)])
        assert first >= 1
        assert again == 0


def test_rules_that_differ_in_what_they_hold_are_told_apart():
    """The same code, other cells; the same values, other derivatives."""

    def slope(factor):
        factors = jnp.full(N, factor)

        @jax.custom_jvp
        def same(x):
            return 1.0 * x

        @same.defjvp
        def _(primals, tangents):
            return same(*primals), factors[0] * tangents[0]

        def trace(s):
            operator = lx.FunctionLinearOperator(lambda v: same(s) * v, structure())
            return tr.trace(KEY, operator, 2, ESTIMATOR).value

        return jax.grad(trace)(1.0)

    slopes = [slope(2.0), slope(3.0), slope(2.0)]
    np.testing.assert_allclose(slopes, [12.0, 18.0, 12.0], rtol=1e-13)


# --- traced values -------------------------------------------------------------------------------


class Model(eqx.Module):
    """One of the traps that this project grew out of."""

    matrix: jax.Array
    function: object = eqx.field(static=True, default=jnp.sin)

    def __call__(self, key, scale):
        operator = lx.FunctionLinearOperator(
            lambda v: scale * self.function(self.matrix) @ v, structure()
        )
        return tr.trace(key, operator, 3).value


@pytest.mark.parametrize("transform", [jax.jit, lambda f: jax.jit(jax.grad(f))])
def test_scanned_module_under_jit_leaks_nothing(transform):
    model = Model(MATRIX)

    def run(scale):
        def step(total, key):
            return total + model(key, scale), None

        return jax.lax.scan(step, jnp.zeros(()), jr.split(KEY, 3))[0]

    with jax.checking_leaks():
        value = transform(run)(jnp.asarray(1.0))
    expected = sum(model(key, 1.0) for key in jr.split(KEY, 3))
    np.testing.assert_allclose(value, expected, rtol=1e-12)


class Scale(eqx.Module):
    """A function with an array."""

    s: jax.Array

    def __call__(self, v):
        return self.s * v


def operator_by_parts(operator):
    """A product, made part by part without lineax's."""
    if isinstance(operator, lx.AddLinearOperator):
        parts = operator_by_parts(operator.operator1), operator_by_parts(operator.operator2)
        return lambda v: parts[0](v) + parts[1](v)
    if isinstance(operator, lx.ComposedLinearOperator):
        parts = operator_by_parts(operator.operator1), operator_by_parts(operator.operator2)
        return lambda v: parts[0](parts[1](v))
    if isinstance(operator, lx.MulLinearOperator):
        part = operator_by_parts(operator.operator)
        return lambda v: operator.scalar * part(v)
    return operator.mv


class Foreign(lx.AbstractLinearOperator):
    """A user's operator, whose function is a leaf, and hides what it likes."""

    function: object

    def mv(self, vector):
        return self.function(vector)

    def as_matrix(self):
        raise NotImplementedError

    def transpose(self):
        raise NotImplementedError

    def in_structure(self):
        return structure()

    def out_structure(self):
        return structure()


register_tags(Foreign, lambda operator: False)


def test_an_operator_of_a_class_that_lineax_does_not_know():
    """Its tracers are found, and differentiated."""

    def trace(s):
        return tr.trace(KEY, Foreign(lambda v: s * v), 2, ESTIMATOR).value

    with jax.checking_leaks():
        value, slope = jax.jit(jax.value_and_grad(trace))(jnp.asarray(2.0))
    np.testing.assert_allclose([value, slope], [12.0, 6.0], rtol=1e-13)


class HiddenField(Foreign):
    """One whose function is no leaf."""

    field: object = eqx.field(static=True)

    def mv(self, vector):
        return self.field(vector)


register_tags(HiddenField, lambda operator: False)


class Weights:
    """A model that is trained in place, as far as JAX knows a constant."""

    def __init__(self, weights):
        self.weights = weights

    def __call__(self, vector):
        return self.weights * vector


@pytest.mark.parametrize("made", [Foreign, lambda fn: HiddenField(None, fn)])
@pytest.mark.parametrize("in_place", [False, True])
def test_arrays_that_change_inside_of_an_operator_are_seen(made, in_place):
    """What was compiled with other numbers is not used again."""
    model = Weights(np.ones(N))
    identity = lx.IdentityLinearOperator(structure())
    for number in (1.0, 2.0, 3.0, 2.0):
        if in_place:
            model.weights[:] = number
        else:
            model.weights = jnp.full(N, number)
        operator = made(model)
        for budget in (2, N):
            found = tr.trace(KEY, operator, budget, ESTIMATOR).value
            np.testing.assert_allclose(found, N * number, rtol=1e-13)
        found = tr.trace(KEY, operator + identity, N).value
        np.testing.assert_allclose(found, N * (number + 1), rtol=1e-13)


def test_arrays_that_do_not_change_inside_of_an_operator_compile_once():
    model = Weights(np.ones(N))
    first, _ = traces_of(lambda: tr.trace(KEY, Foreign(model), 2, ESTIMATOR))
    again, _ = traces_of(lambda: tr.trace(KEY, Foreign(model), 2, ESTIMATOR))
    assert (first, again) == (1, 0)


def test_a_tracer_in_a_static_field_is_differentiated():
    def trace(s):
        return tr.trace(KEY, HiddenField(None, lambda v: s * v), 2, ESTIMATOR).value

    value, slope = jax.jit(jax.value_and_grad(trace))(jnp.asarray(2.0))
    np.testing.assert_allclose([value, slope], [12.0, 6.0], rtol=1e-13)


def test_an_operator_of_a_class_that_lineax_does_not_know_in_a_sum():
    """Sums and products of lineax ask whether their parts are diagonal or tridiagonal."""
    class_of = Foreign(lambda v: 3.0 * v + jnp.roll(v, 1) + jnp.roll(v, -1))
    identity = lx.IdentityLinearOperator(structure())
    for operator in (class_of + 0.5 * identity, identity @ class_of, 2 * (class_of - identity)):
        truth = np.trace(np.asarray(jax.vmap(operator_by_parts(operator))(jnp.eye(N))))
        found = tr.trace(KEY, operator, N)
        np.testing.assert_allclose(found.value, truth, rtol=1e-12)

    def trace(s):
        operator = Foreign(Scale(s)) + identity
        return tr.trace(KEY, operator, N).value

    np.testing.assert_allclose(jax.jit(jax.grad(trace))(jnp.asarray(2.0)), N, rtol=1e-12)


def test_ranks_are_combined_whatever_the_user_allows():
    """Also where a factorisation is lowered, long after it was traced."""
    size = structure(shape=(80,))
    weights = jnp.arange(1.0, 81.0)

    def trace(key):
        operator = lx.FunctionLinearOperator(lambda v: weights * v, size)
        return tr.trace(key, operator, rtol=0.1, estimator=tr.XTraceEstimator()).value

    jax.clear_caches()
    with jax.numpy_rank_promotion("raise"):
        value = jax.jit(trace)(KEY)
    np.testing.assert_allclose(value, trace(KEY), rtol=1e-12)


# --- vmap over an axis of a mesh -----------------------------------------------------------------


@pytest.mark.parametrize("batched", ["key", "operator"])
def test_vmap_keeps_the_axis_of_the_mesh(batched):
    """`spmd_axis_name` cuts the batch; constraints inside the operator must say so."""
    mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def trace(key, scale):
        def mv(v):
            return jax.lax.with_sharding_constraint(scale * v, sharding)

        operator = lx.FunctionLinearOperator(mv, structure())
        return tr.trace(key, operator, 2, tr.HutchinsonEstimator()).value

    axes = {"key": (0, None), "operator": (None, 0)}[batched]
    keys, scales = jr.split(KEY, 4), jnp.arange(1.0, 5.0)
    arguments = keys if batched == "key" else KEY, scales if batched == "operator" else 2.0
    mapped = jax.vmap(trace, axes, spmd_axis_name="b")
    text = jax.jit(mapped).lower(*arguments).as_text()
    assert '"b"' in text
    values = jax.jit(mapped)(*arguments)
    np.testing.assert_allclose(values, N * (scales if batched == "operator" else 2 * np.ones(4)))


# --- wide products -------------------------------------------------------------------------------


def through(kind, dtype):
    """An operator with products of float32, whose vectors pass through `dtype`."""
    narrow = lambda v: v.astype(dtype).astype(jnp.float32)  # noqa: E731
    structure, one = jax.ShapeDtypeStruct((3,), jnp.float32), jnp.ones(3, jnp.float32)
    scale = jnp.arange(3.0, dtype=dtype)
    bodies = {
        "jit": jax.jit(narrow),
        "scan": lambda v: lax.scan(lambda v, _: (narrow(v), None), v, None, length=2)[0],
        "while": lambda v: lax.fori_loop(0, 2, lambda _, v: narrow(v), v),
        "cond": lambda v: lax.cond(scale[0] > 0, narrow, lambda v: v, v),
        "checkpoint": jax.checkpoint(narrow),
        "constant": lambda v: v * (scale * scale).astype(jnp.float32),
        "called with": lambda v: jax.jit(lambda v, x: v * (x + x).astype(v.dtype))(v, scale),
    }
    if kind == "jacobian":
        return lx.JacobianLinearOperator(lambda x, _: jnp.sin(narrow(x)), one)
    if kind == "sum":
        function = lx.FunctionLinearOperator(narrow, structure)
        return 2 * function + lx.DiagonalLinearOperator(one)
    return lx.FunctionLinearOperator(bodies[kind], structure)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("kind", ["jit", "scan", "while", "cond", "checkpoint", "jacobian", "sum"])
def test_the_precision_of_a_product_is_that_of_what_a_vector_passes_through(kind, dtype):
    block = BlockOperator(as_operator(through(kind, dtype)))
    units = 2 if dtype == jnp.float16 else 1  # a function rounds more than once
    assert block.eps == block.linearised().eps == units * float(jnp.finfo(dtype).eps)
    assert block.is_inexact == (dtype == jnp.float16)


@pytest.mark.parametrize("kind", ["constant", "called with"])
def test_the_precision_of_what_a_function_holds_does_not_matter(kind):
    block = BlockOperator(as_operator(through(kind, jnp.bfloat16)))
    assert block.eps == float(jnp.finfo(jnp.float32).eps)


def test_functions_are_given_64_vectors_at_most():
    size = structure(shape=(400,))
    operator = lx.FunctionLinearOperator(lambda v: 2.0 * v, size)
    for wanted, expected in ((1, 1), (64, 64), (65, 33), (75, 38), (128, 64), (200, 50)):
        assert batch_width(operator, wanted) == expected
    dense = lx.MatrixLinearOperator(jnp.eye(400))
    assert batch_width(dense + lx.IdentityLinearOperator(size), 300) == 300
    assert batch_width(dense + operator, 300) == 60
    assert batch_width(in_batches(operator, 200), 300) == 200


def attention_loss(params, tokens):
    """A small transformer whose layers are scanned over."""
    hidden = params["embedding"][tokens]

    def layer(hidden, weights):
        normal = (hidden - hidden.mean(-1, keepdims=True)) / (hidden.std(-1, keepdims=True) + 1e-3)
        scores = jnp.einsum("bqd,de,bke->bqk", normal, weights["a"], normal)
        hidden = hidden + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), normal)
        return hidden + jax.nn.gelu(hidden @ weights["b"]) @ weights["b"].T, None

    hidden, _ = jax.lax.scan(layer, hidden, params["layers"])
    log_probs = jax.nn.log_softmax(hidden @ params["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(log_probs[:, :-1], tokens[:, 1:, None], -1))


@pytest.mark.slow
def test_wide_products_of_a_scanned_transformer():
    """Each vector of a block has the product that it has by itself: 100 vectors, 6400 tokens."""
    d, words = 8, 11
    keys = jr.split(KEY, 4)
    layers = {"a": jr.normal(keys[1], (2, d, d)) / d, "b": jr.normal(keys[2], (2, d, 16)) / d}
    params = {"embedding": jr.normal(keys[0], (words, d)), "layers": layers}
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    tokens = jr.randint(keys[3], (4, 16), 0, words)
    operator = tr.curvature.hessian(attention_loss, params, tokens)
    n = operator.in_size()
    block = BlockOperator(operator)
    probes = jr.normal(KEY, (n, 100), jnp.float32)
    found = jax.jit(block.mm)(probes)
    flat, unravel = ravel_pytree(params)

    def product(v):
        gradient = jax.grad(lambda x: attention_loss(unravel(x), tokens))
        return jax.jvp(gradient, (flat,), (v,))[1]

    # `unravel` has the leaves in the order of the operator.
    expected = jax.jit(lambda x: jax.lax.map(product, x.T).T)(probes)
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(jnp.max(jnp.abs(expected))))


# --- what is used of JAX -------------------------------------------------------------------------

# Modules and functions that anybody uses: no decision to be made about these.
ORDINARY = {
    *("numpy", "lax", "random", "tree", "tree_util", "scipy", "nn", "Array", "ShapeDtypeStruct"),
    *(
        "jit",
        "vmap",
        "grad",
        "jvp",
        "vjp",
        "hessian",
        "linearize",
        "linear_transpose",
        "eval_shape",
    ),
    *("checkpoint", "custom_jvp", "custom_vjp", "make_jaxpr", "block_until_ready", "typeof"),
}
# Everything else, each a decision: what it is for, and that its replacement is known.
DECIDED = {
    "config.update",  # precision of the command line
    "config.values",  # the default device, on which products are rounded as its platform does
    "core.ShapedArray",  # abstract values, in the file of the primitive
    "core.Trace",  # told apart from values, in keys
    "core.Tracer",
    "core.eval_jaxpr",  # as Equinox's closures do
    "ensure_compile_time_eval",  # shifts that are known are read inside of programs
    "custom_batching.custom_vmap",
    "custom_batching.sequential_vmap",
    "debug.callback",  # the progress bar
    "default_backend",  # where there is no default device
    "default_matmul_precision",  # the checks of an estimator: TF32
    "dtypes.canonicalize_dtype",
    "dtypes.float0",
    "dtypes.prng_key",
    "extend.core.Primitive",
    "interpreters.ad",
    "interpreters.batching",
    "interpreters.mlir",
    "jacfwd",  # the checks of an estimator: every nesting
    "jacrev",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "sharding.AbstractMesh",
    "sharding.AxisType",
    "sharding.Mesh",
    "sharding.NamedSharding",
    "sharding.PartitionSpec",
    "sharding.Sharding",
    "sharding.auto_axes",
    "sharding.get_abstract_mesh",
    "sharding.use_abstract_mesh",
    "typing.ArrayLike",
    "typing.DTypeLike",
    "value_and_grad",
}


def used_of_jax(source):
    """The dotted names under `jax` that a file uses or imports."""
    found = set()

    def dotted(node):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        return [node.id, *parts[::-1]] if isinstance(node, ast.Name) else []

    inner = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            prefix = node.module.split(".")[1:]
            found |= {".".join([*prefix, name.name]) for name in node.names}
        if isinstance(node, ast.Attribute) and node not in inner:
            inner |= {x for x in ast.walk(node) if isinstance(x, ast.Attribute)}
            parts = dotted(node)
            if parts[:1] == ["jax"]:
                found.add(".".join(parts[1:]))
    return found


def test_what_is_used_of_jax_is_a_decision():
    used = set().union(*(used_of_jax(path.read_text()) for path in SOURCES))
    special = {name for name in used if name.split(".")[0] not in ORDINARY}
    assert special == DECIDED
