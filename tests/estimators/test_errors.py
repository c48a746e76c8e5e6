"""Bad input: each message says what was given, and what to do instead."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse

import traceax as tr

from ..helpers import CLASSES, PSD, with_spectrum

N = 8
KEY = jax.random.key(0)
MATRIX = with_spectrum(np.random.default_rng(0), np.linspace(1, 3, N))
OPERATOR = lx.MatrixLinearOperator(jnp.asarray(MATRIX), PSD)
COMPLEX = lx.MatrixLinearOperator(jnp.asarray(MATRIX.astype(np.complex128)))


def says(*parts):
    """A pattern for a message that holds all of `parts`, in this order."""
    return re.compile(".*".join(re.escape(part) for part in parts), re.DOTALL)


# --- the operator --------------------------------------------------------------------------------

NOT_OPERATORS = {
    "jax array": (
        lambda: jnp.asarray(MATRIX),
        says("got an array of shape (8, 8) and dtype float64", "lineax.MatrixLinearOperator"),
    ),
    "numpy array": (
        lambda: MATRIX,
        says("got an array of shape (8, 8) and dtype float64", "lineax.MatrixLinearOperator"),
    ),
    "list": (lambda: MATRIX.tolist(), says("got a list", "lineax.MatrixLinearOperator(matrix)")),
    "function": (
        lambda: lambda v: 2.0 * v,
        says("got a function", "lineax.FunctionLinearOperator(fn, input_structure)"),
    ),
    "scipy sparse": (
        lambda: scipy.sparse.csr_array(MATRIX),
        says("got a csr_array", "traceax.SparseLinearOperator(matrix)"),
    ),
    "scipy sparse matrix": (
        lambda: scipy.sparse.coo_matrix(MATRIX),
        says("got a coo_matrix", "traceax.SparseLinearOperator(matrix)"),
    ),
    "BCOO": (
        lambda: sparse.BCOO.fromdense(jnp.asarray(MATRIX)),
        says("got a BCOO", "traceax.SparseLinearOperator(matrix)"),
    ),
    "None": (lambda: None, says("got a NoneType", "lineax.MatrixLinearOperator(matrix)")),
    "string": (lambda: "A", says("got a str", "lineax.MatrixLinearOperator(matrix)")),
    "structure": (
        lambda: jax.ShapeDtypeStruct((8,), jnp.float64),
        says("got a ShapeDtypeStruct", "lineax.MatrixLinearOperator(matrix)"),
    ),
}


@pytest.mark.parametrize("what", NOT_OPERATORS)
def test_what_is_not_an_operator(what):
    build, message = NOT_OPERATORS[what]
    with pytest.raises(TypeError, match=message):
        tr.trace(KEY, build(), 4)
    with pytest.raises(TypeError, match=message):
        tr.HutchinsonEstimator().estimate(KEY, build(), 4)


@pytest.mark.parametrize("name", CLASSES)
def test_operator_that_is_not_square(name):
    operator = lx.MatrixLinearOperator(jnp.ones((5, 3)))
    with pytest.raises(ValueError, match=says("square", "5 x 3", "`A.T @ A`")):
        tr.trace(KEY, operator, 2, CLASSES[name])
    wide = lx.FunctionLinearOperator(
        lambda v: jnp.concatenate([v, v]), jax.ShapeDtypeStruct((3,), jnp.float64)
    )
    with pytest.raises(ValueError, match=says("square", "6 x 3")):
        tr.trace(KEY, wide, 2, CLASSES[name])


def test_mixed_real_and_complex_structure():
    structure = {
        "re": jax.ShapeDtypeStruct((2,), jnp.float64),
        "im": jax.ShapeDtypeStruct((3,), jnp.complex128),
    }
    operator = lx.FunctionLinearOperator(lambda v: v, structure)
    with pytest.raises(ValueError, match=says("mixes real and complex", "complex128", "Declare")):
        tr.trace(KEY, operator, 2)
    # A complex matrix that multiplies real vectors only.
    to_complex = lx.FunctionLinearOperator(
        lambda v: v.astype(complex) * jnp.asarray(1j), jax.ShapeDtypeStruct((3,), jnp.float64)
    )
    with pytest.raises(ValueError, match=says("mixes real and complex", "Declare")):
        tr.trace(KEY, to_complex, 2)


# --- the budget ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "kind", "message"),
    [
        (4.0, TypeError, says("k must be a Python int", "4.0", "float", "int(k)")),
        (np.float64(4), TypeError, says("k must be a Python int", "4.0", "int(k)")),
        (True, TypeError, says("k must be a Python int", "the bool True")),
        (np.True_, TypeError, says("k must be a Python int", "the bool True")),
        ("4", TypeError, says("k must be a Python int", "'4'", "str")),
        (None, TypeError, says("k must be a Python int", "None", "NoneType")),
        ((4,), TypeError, says("k must be a Python int", "(4,)", "tuple")),
        (0, ValueError, says("k must be at least 1 matvec", "got 0")),
        (-3, ValueError, says("k must be at least 1 matvec", "got -3")),
    ],
)
def test_budget_that_is_no_positive_integer(k, kind, message):
    for estimator in CLASSES.values():
        with pytest.raises(kind, match=message):
            tr.trace(KEY, OPERATOR, k, estimator)


def test_traced_budget():
    with pytest.raises(TypeError, match=says("k must be a static Python int", "static_argnames")):
        jax.jit(lambda k: tr.trace(KEY, OPERATOR, k).value)(4)


@pytest.mark.parametrize("k", [np.int64(4), np.uint8(4), jnp.asarray(4)])
def test_integers_of_every_make(k):
    expected = tr.trace(KEY, OPERATOR, 4, tr.HutchinsonEstimator())
    assert tr.trace(KEY, OPERATOR, k, tr.HutchinsonEstimator()).value == expected.value


@pytest.mark.parametrize(("name", "smallest"), [("hutch++", 3), ("xtrace", 2)])
def test_budget_below_the_smallest_is_raised_with_a_warning(name, smallest):
    expected = tr.trace(KEY, OPERATOR, smallest, CLASSES[name])
    for k in range(1, smallest):
        message = says(
            type(CLASSES[name]).__name__,
            f"needs at least {smallest} matvecs",
            f"k={k}",
            f"raised to {smallest}",
        )
        with pytest.warns(UserWarning, match=message):
            solution = tr.trace(KEY, OPERATOR, k, CLASSES[name])
        assert solution.value == expected.value
        assert solution.num_matvecs == smallest


def test_warning_points_at_the_caller():
    with pytest.warns(UserWarning, match="at least 2") as record:
        tr.trace(KEY, OPERATOR, 1, tr.XTraceEstimator())
    assert record[0].filename == __file__


@pytest.mark.parametrize("name", CLASSES)
def test_no_warning_where_the_operator_is_smaller_than_the_budget(name):
    """n = 1 with k = 1 is exact: nothing was raised, and nothing is warned of."""
    one = lx.MatrixLinearOperator(jnp.full((1, 1), 2.5), PSD)
    solution = tr.trace(KEY, one, 1, CLASSES[name])
    assert (solution.value, solution.std_err) == (2.5, 0.0)


# --- the key -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (lambda: OPERATOR, says("MatrixLinearOperator", "pass it first")),
        (lambda: None, says("got NoneType", "jax.random.key(0)")),
        (lambda: 0, says("got int", "jax.random.key(0)")),
        (lambda: jax.random.split(KEY, 3), says("single", "shape (3,)", "jax.vmap")),
        (
            lambda: jax.random.split(jax.random.PRNGKey(0), 3),
            says("single", "shape (3, 2)", "jax.vmap"),
        ),
        (lambda: jnp.ones(2), says("shape (2,)", "float64", "jax.random.key(0)")),
        (lambda: jnp.ones((), jnp.int32), says("shape ()", "int32", "jax.random.key(0)")),
    ],
)
def test_what_is_not_a_key(key, message):
    with pytest.raises(TypeError, match=message):
        tr.trace(key(), OPERATOR, 4)


def test_operator_passed_first():
    """The order of other packages, `trace(operator, k)`, and a missing key."""
    with pytest.raises(TypeError, match=says("MatrixLinearOperator", "first, before the operator")):
        tr.trace(OPERATOR, KEY, 4)
    with pytest.raises(TypeError, match=says("MatrixLinearOperator", "first, before the operator")):
        tr.trace(OPERATOR, 4)


# --- the estimator and its sampler ---------------------------------------------------------------


def test_estimator_class_instead_of_instance():
    with pytest.raises(TypeError, match=says("instance", "XTraceEstimator()", "XNysTrace")):
        tr.trace(KEY, OPERATOR, 4, tr.XNysTraceEstimator)
    with pytest.raises(TypeError, match=says("instance", "'xtrace'")):
        tr.trace(KEY, OPERATOR, 4, "xtrace")


def test_untagged_operator_for_xnystrace():
    message = says("semidefinite", "MatrixLinearOperator", "lineax.TaggedLinearOperator", "XTrace")
    for tags in ((), lx.symmetric_tag):
        with pytest.raises(ValueError, match=message):
            tr.trace(
                KEY, lx.MatrixLinearOperator(OPERATOR.matrix, tags), 4, tr.XNysTraceEstimator()
            )
        with pytest.raises(ValueError, match=message):  # also where no probe would be drawn
            tr.trace(
                KEY, lx.MatrixLinearOperator(OPERATOR.matrix, tags), N, tr.XNysTraceEstimator()
            )


RESPHERING = [tr.HutchPlusPlusEstimator, tr.XTraceEstimator, tr.XNysTraceEstimator]


@pytest.mark.parametrize("estimator", RESPHERING)
@pytest.mark.parametrize("sampler", [tr.RademacherSampler, tr.SteinhausSampler])
def test_improved_with_probes_that_are_not_rotation_invariant(estimator, sampler):
    message = says("improved=True", "biased", sampler.__name__, "NormalSampler", "improved=False")
    with pytest.raises(ValueError, match=message):
        estimator(sampler(), improved=True)
    assert estimator(sampler(), improved=False).improved is False
    assert estimator(sampler()).improved is None


@pytest.mark.parametrize("estimator", RESPHERING)
@pytest.mark.parametrize("value", ["yes", 2, 0.5])
def test_improved_that_is_no_bool(estimator, value):
    with pytest.raises(ValueError, match=says("True, False or None", repr(value))):
        estimator(improved=value)


@pytest.mark.parametrize("sampler", [tr.NormalSampler(float), tr.SphereSampler(np.float32)])
def test_improved_with_real_probes_of_a_complex_operator(sampler):
    estimator = tr.XTraceEstimator(sampler, improved=True)
    with pytest.raises(ValueError, match=says("improved=True", "real", "complex128", "without")):
        tr.trace(KEY, COMPLEX, 4, estimator)
    # By default such probes are simply not renormalised.
    solution = tr.trace(KEY, COMPLEX, 4, tr.XTraceEstimator(sampler))
    plain = tr.trace(KEY, COMPLEX, 4, tr.XTraceEstimator(sampler, improved=False))
    assert solution.value == plain.value


@pytest.mark.parametrize(
    "sampler",
    [tr.NormalSampler(complex), tr.SphereSampler(np.complex64), tr.SteinhausSampler(complex)],
)
@pytest.mark.parametrize("estimator", [tr.HutchinsonEstimator, tr.XTraceEstimator])
def test_complex_probes_of_a_real_operator(sampler, estimator):
    message = says(type(sampler).__name__, "complex", "the operator is float64", "without a dtype")
    with pytest.raises(ValueError, match=message):
        tr.trace(KEY, OPERATOR, 4, estimator(sampler))


def test_steinhaus_probes_of_a_real_operator():
    message = says("SteinhausSampler", "float64 is not a complex dtype", "RademacherSampler")
    with pytest.raises(ValueError, match=message):
        tr.trace(KEY, OPERATOR, 4, tr.HutchinsonEstimator(tr.SteinhausSampler()))
    with pytest.raises(ValueError, match=message):
        tr.SteinhausSampler(float)


@pytest.mark.parametrize("sampler", [tr.NormalSampler, tr.SphereSampler])
def test_integer_probes_of_continuous_distributions(sampler):
    with pytest.raises(ValueError, match=says(sampler.__name__, "floating or complex", "int64")):
        sampler(int)


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "8"])
def test_batch_size_that_is_no_positive_integer(size):
    with pytest.raises(ValueError, match=says("batch_size", "int of at least 1", repr(size))):
        tr.HutchinsonEstimator(batch_size=size)


# --- errors at run time --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_throw_raises_at_run_time(number):
    call = eqx.filter_jit(lambda op: tr.trace(KEY, op, 4, tr.HutchinsonEstimator(), throw=True))
    broken = lx.MatrixLinearOperator(jnp.asarray(MATRIX).at[2, 5].set(number), PSD)
    with pytest.raises(Exception, match="holds NaN or inf"):
        jax.block_until_ready(call(broken).value)
    # The same compiled function takes a sound operator; and without `throw` nothing is raised.
    expected = tr.trace(KEY, OPERATOR, 4, tr.HutchinsonEstimator())
    assert call(OPERATOR).value == expected.value
    assert tr.trace(KEY, broken, 4).result == tr.RESULTS.nonfinite_operator


def test_throw_names_the_wrong_tag():
    lie = lx.MatrixLinearOperator(jnp.asarray(-MATRIX), PSD)
    with pytest.raises(Exception, match="tagged positive"):
        tr.trace(KEY, lie, 4, tr.XNysTraceEstimator(), throw=True)


def test_a_solution_shows_its_numbers():
    """And shapes where there are none: inside `jit`, under `vmap`, of diagonals."""
    matrix = jnp.diag(jnp.arange(1.0, 41.0))
    operator = lx.FunctionLinearOperator(lambda v: matrix @ v, jax.ShapeDtypeStruct((40,), float))
    solution = tr.trace(jax.random.key(0), operator, 20)
    text = repr(solution)
    assert text.startswith(f"Solution(value={solution.value:.7g}, std_err={solution.std_err:.7g}, ")
    assert text.endswith("num_matvecs=20, result=successful)")
    assert "value=f64[40]" in repr(tr.diagonal(jax.random.key(0), operator, 20))
    definite = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    assert "quadrature_error=" in repr(tr.logdet(jax.random.key(0), definite, 20))
    failed = tr.trace(jax.random.key(0), lx.MatrixLinearOperator(matrix.at[0, 0].set(jnp.nan)), 20)
    assert "value=nan" in repr(failed)
    assert "result=nonfinite_operator" in repr(failed)
    seen = []

    def solve(key):
        seen.append(repr(tr.trace(key, operator, 20)))
        return tr.trace(key, operator, 20)

    batch = jax.jit(jax.vmap(solve))(jax.random.split(jax.random.key(0), 3))
    assert seen == ["Solution(value=f64[], std_err=f64[], num_matvecs=i32[])"]
    assert repr(batch) == "Solution(value=f64[3], std_err=f64[3], num_matvecs=i32[3])"
    pairs = tr.eigenpairs(jax.random.key(0), definite, 40, num=2)
    assert repr(pairs).startswith("Eigenpairs(values=[40, 39], errors=[")
    assert repr(pairs).endswith("num_matvecs=40, result=successful)")
