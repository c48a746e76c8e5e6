"""Every kind of operator: its exact trace, its estimates, its dtypes, and what is known of it.

The dense matrix beside each operator is built with NumPy, not asked of the operator.
"""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr
import traceax.extend as tre
from traceax._operators.known_parts import has_entries, sign_of

from ..helpers import CLASSES, PSD, by_products, register_tags, with_spectrum

N, K = 12, 8
KEY = jax.random.key(0)
F64 = jax.ShapeDtypeStruct((N,), jnp.float64)

_rng = np.random.default_rng(1)
GENERAL = _rng.standard_normal((N, N)) + np.diag(np.arange(N))
OTHER = _rng.standard_normal((N, N))
POSITIVE = with_spectrum(_rng, 0.6 ** np.arange(N))
HERMITIAN = with_spectrum(_rng, 0.6 ** np.arange(N), np.complex128)
BANDED = np.triu(np.tril(GENERAL, 1), -1)


class Own(lx.AbstractLinearOperator):
    """A user's operator."""

    matrix: jax.Array

    def mv(self, vector):
        return self.matrix @ vector

    def as_matrix(self):
        raise AssertionError("an estimator must not ask for the matrix")

    def transpose(self):
        return type(self)(self.matrix.T)

    def in_structure(self):
        return jax.ShapeDtypeStruct(self.matrix.shape[1:], self.matrix.dtype)

    def out_structure(self):
        return jax.ShapeDtypeStruct(self.matrix.shape[:1], self.matrix.dtype)


class MatrixOfMyOwn(Own):
    """It registers lineax's checks, but neither `linearise` nor `diagonal`."""


class Unregistered(Own):
    """It registers no more than lineax insists on."""


class WithEntries(Own):
    """With entries if `known`, and with lineax's checks, so that it is seen in sums."""

    known: bool = eqx.field(static=True, default=True)


COLUMNS: list[int] = []  # the number of columns of each block that is multiplied


@jax.custom_batching.custom_vmap
def _counted(matrix, vector):
    return matrix @ vector


@_counted.def_vmap
def _(axis_size, in_batched, matrix, vectors):
    assert in_batched == [False, True]
    COLUMNS.append(axis_size)  # estimators multiply blocks, of one vector too
    return (matrix @ vectors.T).T, True


class Counting(Own):
    """Counts the columns that it is multiplied by, when it is traced."""

    number: int = eqx.field(static=True)  # no two are alike, so that each is traced
    positive: bool = eqx.field(static=True, default=False)

    def mv(self, vector):
        return _counted(self.matrix, vector)


_numbers = itertools.count()


def counting(matrix, positive=False):
    return Counting(jnp.asarray(matrix), next(_numbers), positive)


register_tags(MatrixOfMyOwn, lambda operator: False)
register_tags(Counting, lambda operator: operator.positive)
register_tags(WithEntries, lambda operator: False)
for _check in (lx.is_symmetric, lx.is_positive_semidefinite, lx.is_negative_semidefinite):
    _check.register(Unregistered)(lambda operator: False)


@tre.stored_entries.register(WithEntries)
def _(operator, rows, columns):
    return operator.matrix[rows][:, columns] if operator.known else None


def matrix_operator(matrix, tags=()):
    return lx.MatrixLinearOperator(jnp.asarray(matrix), tags)


def shaped_function(in_shapes, out_shapes):
    """A v for PyTrees v, given as dictionaries of shapes (or as one shape)."""

    def structure(shapes):
        if isinstance(shapes, tuple):
            return jax.ShapeDtypeStruct(shapes, jnp.float64)
        return {name: jax.ShapeDtypeStruct(shape, jnp.float64) for name, shape in shapes.items()}

    def call(v):
        flat = jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(v)])
        product = jnp.asarray(GENERAL) @ flat
        leaves, treedef = jax.tree.flatten(structure(out_shapes))
        split = np.cumsum([np.prod(x.shape, dtype=int) for x in leaves])[:-1]
        pieces = jnp.split(product, split)
        shaped = [p.reshape(x.shape) for p, x in zip(pieces, leaves, strict=True)]
        return jax.tree.unflatten(treedef, shaped)

    return lx.FunctionLinearOperator(call, structure(in_shapes))


_diagonal = np.arange(1.0, N + 1)

DIAGONAL = lx.DiagonalLinearOperator(jax.device_put(_diagonal))
IDENTITY = lx.IdentityLinearOperator(F64)
SHAPES = {"a": (), "b": (2, 3), "c": (5, 1, 1)}

OWN = jax.device_put(GENERAL)
# Those whose entries are stored are in `test_stored`.
CASES = {
    "function-dictionary": (shaped_function(SHAPES, SHAPES), GENERAL),
    "function-other-structure": (shaped_function((3, 4), {"x": (2, 2), "y": (8,)}), GENERAL),
    "add": (matrix_operator(GENERAL) + by_products(OTHER), GENERAL + OTHER),
    "multiple": (by_products(GENERAL) * jnp.asarray(2.5), 2.5 * GENERAL),
    "composed": (by_products(GENERAL) @ matrix_operator(OTHER), GENERAL @ OTHER),
    "own": (MatrixOfMyOwn(OWN), GENERAL),
    "own-composed": (
        MatrixOfMyOwn(OWN) @ matrix_operator(OTHER) - matrix_operator(OTHER),
        GENERAL @ OTHER - OTHER,
    ),
    "unregistered": (Unregistered(OWN) + matrix_operator(OTHER), GENERAL + OTHER),
}


@functools.cache
def exact_traces():
    """Of all cases, by one program."""

    @eqx.filter_jit
    def run(operators):
        return {name: tr.trace(KEY, x, N, tr.XTraceEstimator()) for name, x in operators.items()}

    return jax.device_get(run({name: operator for name, (operator, _) in CASES.items()}))


@pytest.mark.parametrize("name", CASES)
def test_exact_trace_is_the_trace_of_the_matrix(name):
    solution, matrix = exact_traces()[name], CASES[name][1]
    assert abs(solution.value - np.trace(matrix)) <= 1e-13 * np.linalg.norm(matrix)
    assert solution.std_err == 0
    assert solution.num_matvecs <= N
    assert solution.result == tr.RESULTS.successful


def test_entries_that_a_class_of_a_user_registers():
    """They are read alone and in sums; an operator of the class without them takes products."""
    matrix = GENERAL @ GENERAL.T
    entries, without = (WithEntries(jnp.asarray(matrix), known) for known in (True, False))
    assert has_entries(entries)
    assert not has_entries(without)

    @eqx.filter_jit
    def run(entries):
        columns = [tre.columns(each, [2, 0]) for each in (entries, without)]
        traces = [tr.trace(KEY, each, 6).value for each in (entries + without, without)]
        return columns, tr.diagonal(KEY, entries, 6), traces

    both, found, (total, part) = jax.device_get(run(entries))
    for columns in both:
        np.testing.assert_allclose(columns, matrix[:, [2, 0]], rtol=1e-13)
    np.testing.assert_array_equal(found.value, np.diag(matrix))
    assert found.num_matvecs == 0
    np.testing.assert_allclose(total, np.trace(matrix) + part, rtol=1e-12)


# --- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [("hutchinson", jnp.float16), ("xtrace", jnp.complex64)]
)
def test_dtype_of_gradient_is_that_of_the_parameter(name, dtype):
    real = jnp.finfo(dtype).dtype
    source = HERMITIAN if jnp.issubdtype(dtype, jnp.complexfloating) else POSITIVE
    matrix = jnp.asarray(source).astype(dtype)

    def f(scale):
        operator = lx.MatrixLinearOperator(scale.astype(dtype) * matrix, PSD)
        return tr.trace(KEY, operator, K, CLASSES[name]).value.real

    scale = jnp.asarray(1.5, real)
    value, slope = jax.jit(jax.value_and_grad(f))(scale)
    assert slope.dtype == real
    # An estimate is homogeneous: its slope in a factor is the value by the factor.
    rtol = 100 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(float(slope), float(value) / 1.5, rtol=rtol)


def test_a_factor_that_is_not_positive_is_an_outcome():
    """Also outside of `jit`, where its sign could be read: an amplitude that has diverged is not a
    tag that is missing.
    """
    for factor, expected in ((0.0, "outside_domain"), (np.nan, "nonfinite_operator")):
        operator = jnp.asarray(factor) * lx.MatrixLinearOperator(jnp.asarray(POSITIVE), PSD)
        solution = tr.logdet(KEY, operator, K, preconditioner=None)
        assert np.isnan(solution.value)
        assert solution.result == getattr(tr.RESULTS, expected)


def test_mixed_float32_and_float64_structure():
    """Ragged, with products in the dtype of each leaf and sums in the widest."""
    structure = {
        "half": jax.ShapeDtypeStruct((5,), jnp.float32),
        "full": jax.ShapeDtypeStruct((1, 7), jnp.float64),
    }

    def call(v):
        flat = jnp.concatenate([v["full"].reshape(-1), v["half"].astype(jnp.float64)])
        product = jnp.asarray(POSITIVE) @ flat
        return {"full": product[:7].reshape(1, 7), "half": product[7:].astype(jnp.float32)}

    operator = lx.FunctionLinearOperator(call, structure)
    with jax.numpy_dtype_promotion("standard"):  # lineax promotes to find whether it is real
        tagged = lx.TaggedLinearOperator(operator, PSD)
    identity = lx.IdentityLinearOperator(structure)

    @jax.jit
    def run(key):
        shifted = lx.AddLinearOperator(operator, identity * jnp.asarray(3.0))
        return (
            tr.trace(key, tagged, K, CLASSES["xnystrace"]),
            tr.trace(key, operator, N, CLASSES["xtrace"]),
            tr.row_norms(key, operator, 2 * N + 1).value,
            [tr.trace(key, each, K).value for each in (shifted, operator)],
        )

    *solutions, rows, (shifted, plain) = jax.device_get(run(KEY))
    for solution in solutions:
        assert solution.value.dtype == jnp.float64
        assert abs(solution.value - np.trace(POSITIVE)) <= 6 * solution.std_err + 1e-6
    np.testing.assert_allclose(rows["half"], np.linalg.norm(POSITIVE, axis=1)[7:], rtol=1e-5)
    np.testing.assert_allclose(shifted - 3.0 * N, plain, rtol=1e-12)


# --- budgets -------------------------------------------------------------------------------------

SMALLEST = {"hutchinson": 1, "hutch++": 3, "xtrace": 2, "xnystrace": 1, "auto": 1}


@pytest.mark.filterwarnings("ignore:.*needs at least.*:UserWarning")
@pytest.mark.parametrize("name", SMALLEST)
def test_no_more_products_than_the_budget(name):
    for k in (1, 2, 3, 6, 7, N - 1, N, N + 7):
        COLUMNS.clear()
        operator = counting(POSITIVE, True)
        jax.eval_shape(lambda key, o=operator, k=k: tr.trace(key, o, k, CLASSES[name]), KEY)
        budget = min(max(k, SMALLEST[name]), N)
        # Every matvec is spent, save the odd one that XTrace has no use for.
        assert budget - (budget % 2 if budget < N else 0) <= sum(COLUMNS) <= budget


# --- what is known is not estimated --------------------------------------------------------------


def test_a_tagged_function_is_estimated():
    """Nothing is read of it: a tag stores no entries."""

    @jax.jit
    def run(key):
        operators = [by_products(BANDED, tags) for tags in (lx.tridiagonal_tag, ())]
        return [tr.trace(key, operator, K).value for operator in operators]

    np.testing.assert_allclose(*run(KEY), rtol=1e-12)


# Each (operator from K, s; what multiplies D; what multiplies K; what multiplies s n).
SHIFTED = {
    "s I + K": (lambda op, s: s * IDENTITY + op, 0.0, 1.0, 1.0),
    "2 (K + s I) - D": (lambda op, s: 2.0 * (op + s * IDENTITY) - DIAGONAL, -1.0, 2.0, 2.0),
    "-(K - s I) / 4 + D": (lambda op, s: -(op - s * IDENTITY) / 4.0 + DIAGONAL, 1.0, -0.25, 0.25),
    "tagged in a sum": (
        lambda op, s: DIAGONAL + 3.0 * lx.TaggedLinearOperator(op + s * IDENTITY, lx.symmetric_tag),
        *(1.0, 3.0, 3.0),
    ),
}


@pytest.mark.parametrize("form", SHIFTED)
def test_auto_spends_its_matvecs_on_what_is_not_known(form):
    """tr(c K + d s I + D) = c tr(K) + d s n + tr(D): the value, the error and the derivative."""
    build, sign, factor, slope = SHIFTED[form]
    kernel, shift, k = by_products(POSITIVE), 0.37, 3

    def value(s):
        solution = tr.trace(KEY, build(kernel, s), k)
        return solution.value, solution

    @jax.jit
    def run(s):
        return *jax.grad(value, has_aux=True)(s), tr.trace(KEY, kernel, k)

    gradient, solution, alone = jax.device_get(run(shift))
    expected = factor * alone.value + slope * shift * N + sign * _diagonal.sum()
    np.testing.assert_allclose(solution.value, expected, rtol=1e-13)
    np.testing.assert_allclose(solution.std_err, abs(factor) * alone.std_err, rtol=1e-13)
    assert solution.num_matvecs == alone.num_matvecs
    assert gradient == slope * N  # exactly: no probe enters it
    # The products themselves.
    COLUMNS.clear()
    operator = build(counting(POSITIVE), shift)
    jax.eval_shape(lambda key: tr.trace(key, operator, k), KEY)
    assert sum(COLUMNS) == k


# Operators from K, a positive number and a negative one, and the sign that they have.
SIGNED = {
    "K + s I": (lambda K, s, _: K + s * IDENTITY, 1),
    "c K": (lambda K, s, _: s * K, 1),
    "-c K": (lambda K, _, c: c * K, -1),
    "K / c - D": (lambda K, _, c: K / c - DIAGONAL, -1),
    "a K - b K": (lambda K, s, c: 3 * s * K + c * K, 0),
}


def test_signs_are_found_at_run_time():
    """The sign of a traced factor cannot be read. It changes neither value nor error."""
    kernel = by_products(POSITIVE, PSD)
    numbers = 0.1, -0.1

    def estimates(s, c):
        made = [build(kernel, s, c) for build, _ in SIGNED.values()]
        named = tr.XNysTraceEstimator(shrink=True)
        return [(sign_of(each), tr.trace(KEY, each, K, named)) for each in made]

    def of_wholes():
        for build, sign in SIGNED.values():
            whole = build(lx.MatrixLinearOperator(jnp.asarray(POSITIVE)), *numbers).as_matrix()
            tagged = by_products(whole, PSD if sign >= 0 else lx.negative_semidefinite_tag)
            yield tr.trace(KEY, tagged, K)

    def to_tolerance(c, function):
        options = {"max_k": 40, "estimator": tr.XNysTraceEstimator()}
        return jnp.sum(function(KEY, c * kernel, rtol=0.3, **options).value)

    @jax.jit
    def run(s, c, one):
        both = [jax.value_and_grad(to_tolerance)(-one, each) for each in (tr.trace, tr.diagonal)]
        wrong = tr.trace(KEY, kernel - one * IDENTITY, K, tr.XNysTraceEstimator())
        made = by_products(POSITIVE + 0j, PSD)
        real = tr.spectral_sum(KEY, jnp.exp, s * made - made / c, N)
        return estimates(s, c), list(of_wholes()), both, wrong, real

    found, wholes, both, wrong, real = jax.device_get(run(*numbers, 1.0))
    truth = np.exp(10.1 * np.linalg.eigvalsh(POSITIVE)).sum()  # a real number
    np.testing.assert_allclose(real.value, truth, strict=True)
    for (_, sign), (at_run_time, solution), expected in zip(
        SIGNED.values(), found, wholes, strict=True
    ):
        assert (at_run_time, solution.result) == (sign, tr.RESULTS.successful)
        np.testing.assert_allclose(solution.value, expected.value, rtol=1e-10)
        np.testing.assert_allclose(solution.std_err, expected.std_err, rtol=1e-8)
    for value, slope in both:
        np.testing.assert_allclose(slope, -value, rtol=1e-10)
    assert wrong.result == tr.RESULTS.not_semidefinite  # what is neither is an outcome


def test_a_diagonal_from_which_something_is_taken_is_no_noise():
    """D - K lies below D: the preconditioner is that of the matrix whose diagonal is not known."""
    kernel = 0.9 * POSITIVE
    below = 2 * IDENTITY - by_products(kernel, PSD)
    operators = lx.TaggedLinearOperator(below, PSD), by_products(2 * np.eye(N) - kernel, PSD)
    options = {"k": K, "preconditioner": tr.NystromPreconditioner(4)}
    written, whole = jax.jit(lambda: [tr.logdet(KEY, each, **options) for each in operators])()
    np.testing.assert_allclose(written.value, whole.value, rtol=1e-10)
    np.testing.assert_allclose(written.std_err, whole.std_err, rtol=1e-8)
