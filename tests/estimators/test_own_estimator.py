"""The page "Write your own estimator", and `check_estimator`, on right and wrong estimators.

Nothing but public names: `traceax`, `traceax.extend` and `traceax.testing`.
"""

import inspect
import re
from pathlib import Path
from typing import ClassVar, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jaxtyping import Array, Inexact

import traceax as tr
import traceax.extend as tre
import traceax.testing
from traceax.testing import check_estimator

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXTEND = [name for name, value in vars(tre).items() if name[0] != "_" and name[0] != "@"]


def of_page(name):
    """A class of the page, without the programs that use it."""
    found = {}
    imports = BLOCKS[0].split("@final")[0]
    (block,) = (block for block in BLOCKS if f"class {name}(" in block)
    definition = re.search(rf"@final\nclass {name}\(.*?\n(?=\S)", block, re.DOTALL)
    exec(imports + definition[0], found)
    return found[name]


# -------------------------------------------------------------------------------- the page


def test_the_page_imports_public_names_only():
    imports = re.findall(r"^(?:from|import) (\S+)", "\n".join(BLOCKS), re.MULTILINE)
    outside = {"typing", "equinox", "jax", "jax.numpy", "lineax"}
    assert set(imports) == outside | {"traceax", "traceax.extend", "traceax.testing"}
    assert not re.search(r"\b(?:tr|tre)(?:\.\w+)*\._", "\n".join(BLOCKS))


@pytest.mark.variant
def test_the_estimator_of_the_page():
    check_estimator(of_page("NAHutchPlusPlusEstimator")())


def test_the_estimator_of_the_page_is_short():
    definition = BLOCKS[0].split("@final")[1].split("\n\n\n")[0]
    assert len(definition.strip().splitlines()) <= 42


def test_the_operator_of_the_page():
    circulant = of_page("Circulant")
    lx.is_symmetric.register(circulant)(lambda operator: True)  # which lineax asks for
    column = jnp.exp(-jnp.minimum(jnp.arange(60.0), 60 - jnp.arange(60.0)) / 5)
    operator = circulant(column)
    np.testing.assert_allclose(operator.as_matrix()[:, 0], column, atol=1e-12)
    np.testing.assert_allclose(operator.as_matrix(), operator.as_matrix().T, atol=1e-12)
    for estimator in (tr.XTraceEstimator(), tr.AutoTraceEstimator()):
        solution = tr.trace(jax.random.key(0), operator, 30, estimator)
        assert abs(solution.value - 60) <= 6 * solution.std_err
    slope = jax.grad(lambda c: tr.trace(jax.random.key(0), circulant(c), 60).value)(column)
    np.testing.assert_allclose(slope, np.where(np.arange(60) == 0, 60.0, 0.0), atol=1e-9)


@pytest.mark.variant
def test_the_preconditioner_of_the_page():
    n = 120
    grid = jnp.arange(1.0, n + 1)
    waves = jnp.cos(jnp.pi * jnp.outer(grid - 0.5, jnp.arange(40.0)) / n)
    base = jnp.exp(-(((grid[:, None] - grid) / 8) ** 2)) + 0.1 * jnp.eye(n)
    own = of_page("SubspacePreconditioner")(waves, 0.1)

    def log_det(scale, preconditioner):
        operator = lx.MatrixLinearOperator(scale * base, lx.positive_semidefinite_tag)
        solution = tr.logdet(jax.random.key(0), operator, 90, preconditioner=preconditioner)
        return solution.value, solution

    with_own = jax.value_and_grad(lambda s: log_det(s, own), has_aux=True)
    (value, solution), slope = with_own(jnp.asarray(1.0))
    error = abs(value - np.linalg.slogdet(base)[1])
    assert error <= 5 * solution.std_err + solution.quadrature_error
    assert error < abs(log_det(jnp.asarray(1.0), None)[0] - np.linalg.slogdet(base)[1])
    np.testing.assert_allclose(slope, n, rtol=0.05)  # d log det(s A) / ds = n / s
    with pytest.raises(ValueError, match="another length"):
        tr.logdet(
            jax.random.key(0),
            lx.MatrixLinearOperator(jnp.eye(5), lx.positive_semidefinite_tag),
            3,
            preconditioner=own,
        )


# --------------------------------------------------------------- fewest methods, and a tolerance


@final
class Plain(tre.AbstractTraceEstimator):
    """Hutchinson's estimator from one method, and with mistakes to choose from."""

    mistake: str = eqx.field(default="", static=True)

    def compute(self, key, operator, k):
        block = tre.BlockOperator(operator)
        probes = tr.SphereSampler().probes(key, block.n, k, block.dtype)
        products = block.mm(probes)
        if self.mistake == "products":
            products = (products + block.mm(probes)) / 2
        value, std_err = tre.mean_and_std_err(jnp.sum(probes.conj() * products, axis=0))
        status = tre.status_of(products)
        u = probes / k
        if self.mistake == "bias":
            value = value * 1.02
        if self.mistake == "weights":
            u = u * 1.02
        if self.mistake == "sample":  # those of half of the samples: unbiased
            u = 2 * u * (jnp.arange(k) % 2).astype(u.dtype)
        if self.mistake == "error":
            std_err = std_err / 2
        if self.mistake == "nan":  # a number, whatever the products are
            value, std_err, status = jnp.nan_to_num(value), jnp.nan_to_num(std_err), 0
        if self.mistake == "scale":  # squares underflow
            std_err = jnp.sqrt(jnp.mean(jnp.abs(products) ** 4)) ** 0.5 + std_err
        if self.mistake == "precision":
            value = jnp.mean(jnp.diagonal(probes.conj().T @ products))
        return (
            tre.make_estimate(value, std_err, k, k - 1, status),
            tre.LowRankWeights(u, probes),
        )


@final
class DiagonalWeights(tre.AbstractWeights):
    """diag(A U V^H)."""

    u: jax.Array
    v: jax.Array

    def contract(self, operator):
        return jnp.sum(tre.BlockOperator(operator).mm(self.u) * self.v.conj(), axis=1)


@final
class PlainDiagonal(tre.AbstractDiagonalEstimator):
    """The diagonal from one method."""

    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 2

    def compute_rows(self, key, operator, k, rows):
        block = tre.BlockOperator(operator)
        probes = tr.RademacherSampler().probes(key, block.n, k, block.dtype)
        products = block.mm(probes)
        value, std_err = tre.mean_and_std_err(rows(probes.conj() * products))
        estimate = tre.make_estimate(value, std_err, k, k - 1, tre.status_of(products))
        return estimate, DiagonalWeights(probes / k, probes)


OPERATOR = lx.FunctionLinearOperator(
    lambda v: jnp.linspace(1.0, 2.0, 200) * v + 0.02 * jnp.sum(v),
    jax.ShapeDtypeStruct((200,), jnp.float64),
)


@pytest.mark.variant  # the check itself runs on the estimator of the page, of one method as well
def test_one_method_is_enough():
    check_estimator(Plain())


@pytest.mark.variant
def test_one_method_is_enough_for_diagonals():
    check_estimator(PlainDiagonal())
    check_estimator(PlainDiagonal(batch_size=3))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("bias", "Plain: the value is biased"),
        ("weights", "the derivative is biased, E<G, dA> is not that of dA"),
        ("sample", "the value is not the contraction <G, A> of its weights"),
        ("error", "intervals hold the true value too rarely"),
        ("nan", "does not end as nonfinite_operator"),
        ("products", "more products than the budget in the program"),
        ("scale", r"times 2\^66 has another standard error"),
        ("precision", "products of matrices in less than full precision"),
    ],
)
@pytest.mark.variant
def test_mistakes_are_found(mistake, message):
    with pytest.raises(AssertionError, match=message):
        check_estimator(Plain(mistake), keys=1000)


def test_no_operator_is_accepted():
    with pytest.raises(ValueError, match="accepts none"):
        check_estimator(tr.XNysTraceEstimator(), operators=[lx.MatrixLinearOperator(jnp.eye(30))])
    with pytest.raises(ValueError, match="below the number of rows"):
        check_estimator(Plain(), operators=[lx.MatrixLinearOperator(jnp.eye(10))])


def test_a_tolerance_is_the_mean_of_its_blocks():
    solution = tr.trace(
        jax.random.key(0), OPERATOR, estimator=Plain(), rtol=0.0, atol=0.0, max_k=50
    )
    keys = [jax.random.key(0), *(tre.numbered(jax.random.key(0), j) for j in (1, 2))]
    sizes = np.array([16, 16, 18])
    blocks = [tr.trace(key, OPERATOR, k, Plain()) for key, k in zip(keys, sizes, strict=True)]
    share = sizes / 50
    values, errors = (np.array([getattr(b, x) for b in blocks]) for x in ("value", "std_err"))
    np.testing.assert_allclose(solution.value, share @ values, rtol=1e-12)
    variances = (share * errors) ** 2
    np.testing.assert_allclose(solution.std_err, np.sqrt(variances.sum()), rtol=1e-12)
    dof = variances.sum() ** 2 / (variances**2 / (sizes - 1)).sum()
    np.testing.assert_allclose(solution.stats["dof"], dof, rtol=1e-10)
    assert int(solution.num_matvecs) == 50
    assert solution.result == tr.RESULTS.not_converged


def test_no_block_of_a_tolerance_has_a_single_sample():
    """Its standard error, and that of the mean, would be infinite."""
    solution = tr.trace(jax.random.key(0), OPERATOR, estimator=Plain(), rtol=0.0, max_k=33)
    assert solution.num_matvecs == 32
    assert abs(solution.value - 304.0) < 5 * solution.std_err < 50


@pytest.mark.variant
def test_a_tolerance_goes_on_from_a_state_and_ends_exactly():
    options = {"estimator": Plain(), "rtol": 1e-9, "keep_state": True}
    first = tr.trace(jax.random.key(0), OPERATOR, max_k=64, **options)
    onward = tr.trace(jax.random.key(9), OPERATOR, max_k=128, state=first.state, **options)
    at_once = tr.trace(jax.random.key(0), OPERATOR, max_k=64, **options)
    np.testing.assert_allclose(first.value, at_once.value, rtol=1e-12)
    assert int(onward.num_matvecs) == 128
    exact = tr.trace(jax.random.key(0), OPERATOR, estimator=Plain(), rtol=1e-9)
    np.testing.assert_allclose(exact.value, 304.0, rtol=1e-12)
    assert float(exact.std_err) == 0
    assert int(exact.num_matvecs) == 300  # those of the blocks, and n


class Forms(NamedTuple):
    """The samples of an algorithm that keeps them."""

    samples: Inexact[Array, " m"]


class PlainForms(tre.AbstractExtendable):
    """Hutchinson's estimator with the methods that runs to a tolerance call."""

    matvecs_per_probe: ClassVar[int] = 1
    calibration: ClassVar[tre.Calibration] = tre.Calibration(stop=2.15, interval=1.02)

    def start(self, growth, block):
        return Forms(jnp.zeros(growth.capacity, block.dtype))

    def _probes(self, growth, block):
        return lambda key: tr.RademacherSampler().probes(key, block.n, growth.width, block.dtype)

    def extend(self, state, growth, block):
        draw = self._probes(growth, block)
        return Forms(growth.each(lambda key: block.quadratic_forms([draw(key)]), state.samples))

    def estimate(self, state, columns, block):
        value, std_err = columns.mean_and_std_err(state.samples)
        return value, std_err, tre.status_of(state.samples)

    def weights(self, state, columns, growth, block):
        omega = growth.probes_of(tr.RademacherSampler(), block, growth.empty(block)).T
        return tre.LowRankWeights(omega / jnp.asarray(columns.used, omega.dtype), omega)

    def complete(self, state, block):
        nothing = jnp.zeros((block.n, 0), block.dtype)
        return tre.complete_trace(block, nothing, nothing)


class Extended(Plain):
    def extendable(self, operator, falls_back_to_exact=False):
        return PlainForms()


@pytest.mark.variant
def test_a_tolerance_with_an_extendable_of_its_own():
    """One program, its own weights, budgets that are traced, and the exact value as last resort."""
    key, n = jax.random.key(0), OPERATOR.in_size()

    def value(c, **options):
        solution = tr.trace(key, c * OPERATOR, estimator=Extended(), **options)
        return solution.value, solution

    for options in ({"rtol": 0.1}, {"rtol": 1e-9, "max_k": 64}, {"k": 40, "max_k": 64}):
        slope, solution = jax.grad(value, has_aux=True)(1.0, **options)
        np.testing.assert_allclose(slope, solution.value, rtol=1e-10)
        assert abs(solution.value - 304.0) < 5 * solution.std_err
        assert solution.num_matvecs <= options.get("k", options.get("max_k", n))
    _, exact = value(1.0, rtol=1e-9)
    np.testing.assert_allclose(exact.value, 304.0, rtol=1e-12)
    assert exact.num_matvecs == n // 2 // 16 * 16 + n


@pytest.mark.variant
def test_a_tolerance_of_a_diagonal_by_blocks():
    structure = {
        "a": jax.ShapeDtypeStruct((50,), jnp.float64),
        "b": jax.ShapeDtypeStruct((30, 5), jnp.float64),
    }
    operator = lx.FunctionLinearOperator(lambda v: jax.tree.map(lambda x: 3 * x, v), structure)
    for function in (tr.diagonal, tr.block_traces):
        solution = function(jax.random.key(0), operator, estimator=PlainDiagonal(), rtol=0.1)
        assert solution.result == tr.RESULTS.successful
        sums = jax.tree.map(jnp.sum, solution.value)
        np.testing.assert_allclose([sums["a"], sums["b"]], [150, 450], rtol=1e-10)


# ------------------------------------------------------------------------ our own estimators

# They have tests of their own for all of this.
CHECKED = ("HutchinsonEstimator", "XTraceEstimator", "XNysTraceEstimator", "XDiagEstimator")


@pytest.mark.variant
@pytest.mark.parametrize("name", CHECKED)
def test_estimators_of_this_package(name):
    estimator = getattr(tr, name)()
    # XNysTrace is differentiated with the weights of XTrace; exact values have no tolerance.
    borrowed = name in ("XNysTraceEstimator", "XNysDiagEstimator", "AutoTraceEstimator")
    contraction = not (borrowed or name == "AutoDiagonalEstimator")
    check_estimator(estimator, contraction=contraction, tolerance="Exact" not in name)


# ------------------------------------------------------------------------------ documentation


@pytest.mark.parametrize("name", EXTEND)
def test_names_of_extend_are_documented(name):
    value = getattr(tre, name)
    doc = inspect.getdoc(value)
    assert doc is not None
    assert len(doc) > 40
    if inspect.isfunction(inspect.unwrap(value)):
        assert "**Arguments:**" in doc
    assert f"`traceax.extend.{name}`" in (ROOT / "docs" / "api.md").read_text()
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    assert f"::: traceax.extend.{name}\n" in pages or f"::: traceax.{name}\n" in pages


def test_names_of_testing_are_documented():
    assert traceax.testing.check_estimator.__doc__
    assert "traceax.testing.check_estimator" in (ROOT / "docs" / "api.md").read_text()
