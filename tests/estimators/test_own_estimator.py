"""The page "Write your own estimator", and `check_estimator`, on right and wrong estimators.

Nothing but public names: `traceax`, `traceax.extend` and `traceax.testing`.
"""

import inspect
import re
from typing import ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tr
import traceax.extend as tre
import traceax.testing
from traceax.testing import check_estimator

from ..helpers import PROBED, ROOT, by_products

PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


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


def test_the_estimator_of_the_page():
    """It is short, and right."""
    definition = BLOCKS[0].split("@final")[1].split("\n\n\n")[0]
    assert len(definition.strip().splitlines()) <= 42
    matrix = np.diag(1 / np.arange(1.0, 201)) + 0.01
    estimator = of_page("NAHutchPlusPlusEstimator")()
    solution = tr.trace(jax.random.key(0), by_products(matrix), 60, estimator)
    assert abs(float(solution.value) - np.trace(matrix)) < 5 * float(solution.std_err)


@pytest.mark.slow(quick=True)
def test_the_estimator_of_the_page_passes_the_check():
    check_estimator(of_page("NAHutchPlusPlusEstimator")())


# --------------------------------------------------------------- an estimator with mistakes


@final
class DiagonalWeights(tre.AbstractWeights):
    """diag(A U V^H)."""

    u: jax.Array
    v: jax.Array
    rows: tre.Rows

    def contract(self, block):
        return self.rows.of_vector(jnp.sum(block.mm(self.u) * self.v.conj(), axis=1))


@final
class Plain(tre.AbstractTraceEstimator):
    """Hutchinson's estimator, and with mistakes to choose from."""

    mistake: str = eqx.field(default="", static=True)
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 2

    def sampling(self, operator, rows):
        return tre.RangeSampling(rows=rows, sampler=tr.RademacherSampler(), sizes=(0,))

    def compute(self, key, operator, k, weights):
        block = tre.BlockOperator(operator)
        probes = tr.SphereSampler().probes(key, block.n, k, block.dtype)
        products = block.mm(probes)
        if self.mistake == "products":
            products = (products - block.mm(-probes)) / 2
        value, std_err = tre.mean_and_std_err(jnp.sum(probes.conj() * products, axis=0))
        evidence = tre.evidence_of(products)
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
            value, std_err = jnp.nan_to_num(value), jnp.nan_to_num(std_err)
            evidence = tre.Evidence()
        if self.mistake == "scale":  # squares underflow
            std_err = jnp.sqrt(jnp.mean(jnp.abs(products) ** 4)) ** 0.5 + std_err
        estimate = tre.Estimate(value, std_err, k, k - 1, evidence)
        return estimate, tre.LowRankWeights(u, probes) if weights else None

    def compute_rows(self, key, operator, k, rows, weights):
        block = tre.BlockOperator(operator)
        probes = tr.RademacherSampler().probes(key, block.n, k, block.dtype)
        products = block.mm(probes)
        value, std_err = tre.mean_and_std_err(rows(probes.conj() * products))
        estimate = tre.Estimate(value, std_err, k, k - 1, tre.evidence_of(products))
        return estimate, DiagonalWeights(probes / k, probes, rows)


@pytest.mark.slow(quick=True)
def test_a_stranger_passes_the_check():
    """Of diagonals, with a tolerance. (That of the page passes the one of traces.)"""
    check_estimator(Plain(batch_size=3), diagonal=True)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("bias", "Plain: the value is biased"),
        ("weights", "the derivative is biased, E<G, dA> is not that of dA"),
        ("sample", "the value is not the contraction <G, A> of its weights"),
        ("error", "intervals hold the true value too rarely"),
        *(
            pytest.param(*row, marks=pytest.mark.slow(quick=True))
            for row in (
                ("nan", "does not end as nonfinite_operator"),
                ("products", "more products than it states"),
                ("scale", r"times 2\^66 has another standard error"),
            )
        ),
    ],
)
def test_mistakes_are_found(mistake, message):
    with pytest.raises(AssertionError, match=message):
        check_estimator(Plain(mistake), keys=1000)


# ------------------------------------------------------------------------ our own estimators


@pytest.mark.slow(quick=True)
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", PROBED)
def test_our_own_estimators_pass(name, diagonal):
    check_estimator(PROBED[name], diagonal=diagonal, contraction=name != "xnystrace")


# ------------------------------------------------------------------------------ documentation


def test_names_of_extend_are_documented():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    names = [name for name in vars(tre) if name[0] not in "_@"]
    for name in names:
        value = getattr(tre, name)
        doc = inspect.getdoc(value) or ""
        assert len(doc) > 40, name
        assert not inspect.isfunction(inspect.unwrap(value)) or "**Arguments:**" in doc, name
        assert f"::: traceax.extend.{name}\n" in pages or f"::: traceax.{name}\n" in pages, name
