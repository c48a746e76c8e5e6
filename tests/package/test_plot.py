"""Pictures: what is drawn where."""

import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import pytest

import traceax as tr

from ..helpers import PSD, by_products, spectra, with_spectrum

N = 60
MATRIX = with_spectrum(np.random.default_rng(0), spectra(N)["poly"])


def solution_of(value, std_err, quadrature_error=None, num_matvecs=10):
    stats = {"dof": jnp.asarray(9)}
    counts = jnp.asarray(num_matvecs), stats, tr.RESULTS.successful
    error = None if quadrature_error is None else jnp.asarray(quadrature_error)
    return tr.Solution(jnp.asarray(value), jnp.asarray(std_err), *counts, error)


def words(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_density_with_its_errors():
    grid = np.linspace(0, 1, 5)
    value, std_err = np.array([0.0, 1, 5, 2, 0]), np.array([0.1, 0.2, 0.7, 0.2, 0.1])
    quadrature_error = np.array([0.0, 0.3, 9, 0.2, np.inf])  # does not decide the scale
    solution = solution_of(value, std_err, quadrature_error)
    axes = tr.plot.spectral_density(grid, solution, exact=2 * value)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("eigenvalue", "density")
    assert axes.get_ylim() == pytest.approx((0, 1.15 * (5 + 1.4)))
    assert axes.get_xlim() == (0, 1)
    estimate, exact = axes.get_lines()
    np.testing.assert_array_equal(estimate.get_xydata(), np.stack([grid, value], axis=1))
    np.testing.assert_array_equal(exact.get_ydata(), 2 * value)
    errors = (2 * std_err + quadrature_error, 2 * std_err)
    for band, error in zip(axes.collections, errors, strict=True):
        corners = {tuple(corner) for corner in np.round(band.get_paths()[0].vertices, 9)}
        top = 2 * 1.15 * (5 + 1.4)
        for x, y, e in zip(grid, value, error, strict=True):
            assert (x, round(min(y + e, top), 9)) in corners
            assert (x, round(max(y - e, 0), 9)) in corners
    assert words(axes) == [
        "two standard errors and quadrature error", "two standard errors", "estimate", "exact"
    ]  # fmt: skip


def test_a_density_on_a_logarithmic_axis():
    """Zeros, and errors that reach below, are left out without a warning."""
    axes = plt.figure().subplots()
    axes.set_yscale("log")
    grid, value = np.linspace(0, 1, 4), np.array([0.0, 0.5, 4, 1e-3])
    solution = solution_of(value, 0.6 * np.ones(4), np.zeros(4))
    assert tr.plot.spectral_density(grid, solution, axes=axes) is axes
    low, high = axes.get_ylim()
    assert 0 < low <= 0.5
    assert high == pytest.approx(1.15 * (4 + 1.2))
    axes.figure.canvas.draw()


def test_a_curve_over_shifts():
    """In the order of the shifts, with both errors, on a logarithmic axis if that can be."""
    shifts = np.array([1.0, 0.01, 0.1])
    value, std_err = np.array([9.0, 2, 5]), np.array([0.1, 0.5, 0.2])
    solution = solution_of(value, std_err, np.array([0.0, 0.3, np.inf]))
    axes = tr.plot.shifts(shifts, solution, exact=value + 1)
    assert (axes.get_xlabel(), axes.get_xscale()) == ("shift", "log")
    estimate, exact = axes.get_lines()
    order = np.argsort(shifts)
    np.testing.assert_array_equal(estimate.get_xydata(), np.stack([shifts, value], axis=1)[order])
    np.testing.assert_array_equal(exact.get_ydata(), (value + 1)[order])
    inner = {tuple(corner) for corner in np.round(axes.collections[1].get_paths()[0].vertices, 9)}
    for x, y, e in zip(shifts, value, 2 * std_err, strict=True):
        assert {(x, round(y + e, 9)), (x, round(y - e, 9))} <= inner
    assert np.all(np.isfinite(axes.get_ylim()))
    axes.figure.canvas.draw()
    axes = tr.plot.shifts(shifts - 0.5, solution)
    assert axes.get_xscale() == "linear"


def test_convergence():
    """Of real solutions, two estimators on the same axes, at a level."""
    operator = by_products(MATRIX, PSD)
    estimators = {"XNysTrace": tr.XNysTraceEstimator(), "Hutchinson": tr.HutchinsonEstimator()}
    axes = None
    for name, estimator in estimators.items():
        found = [tr.trace(jr.key(0), operator, k, estimator) for k in (8, 16, N)]
        truth = None if axes is None else np.trace(MATRIX)
        axes = tr.plot.convergence(found, truth=truth, level=0.8, label=name, axes=axes)
        points = axes.containers[-1]
        line, _, (bars,) = points
        np.testing.assert_allclose(line.get_xdata(), [8, 16, N])
        np.testing.assert_allclose(line.get_ydata(), [x.value for x in found])
        for x, segment in zip(found, bars.get_segments(), strict=True):
            np.testing.assert_allclose(segment[:, 1], x.interval(0.8))
    assert words(axes) == ["exact", *estimators]
    assert axes.get_xlabel() == "products"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "16", "60"]


def test_intervals():
    """With one that says nothing, one that is NaN, and one that is exact."""
    solutions = {
        "good": solution_of(2.0, 0.1),
        "single": solution_of(3.0, jnp.inf),
        "failed": solution_of(jnp.nan, jnp.nan),
        "exact": solution_of(2.5, 0.0),
    }
    axes = tr.plot.interval(solutions, truth=2.5)
    line, _, (bars,) = axes.containers[0]
    np.testing.assert_allclose(line.get_xdata(), [2, 3, 2.5])
    np.testing.assert_allclose(line.get_ydata(), [3, 2, 0])
    good, single, exact = (segment[:, 0] for segment in bars.get_segments())
    np.testing.assert_allclose(good, solutions["good"].interval(), rtol=1e-6)
    np.testing.assert_allclose(single, 3)
    np.testing.assert_allclose(exact, 2.5)
    assert [label.get_text() for label in axes.get_yticklabels()] == list(solutions)
    assert words(axes) == ["exact", "95 % intervals"]


def test_what_cannot_be_drawn():
    vector = solution_of(np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match="nothing to draw"):
        tr.plot.convergence([])
    with pytest.raises(TypeError, match=r"Expected a `traceax\.Solution`, got 3"):
        tr.plot.interval({"three": 3})
    with pytest.raises(ValueError, match=r"a single number, got shape \(3,\)"):
        tr.plot.convergence([vector])
    with pytest.raises(ValueError, match=r"the solution of `traceax\.spectral_density`"):
        tr.plot.spectral_density(np.ones(3), vector)
