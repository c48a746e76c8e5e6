"""Pictures: what is drawn where."""

import dataclasses

import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
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
    extent = 9.2 - 1  # of the curve with two standard errors: as far reaches the infinite error
    np.testing.assert_allclose(axes.dataLim.intervaly, (2 - extent, 9 + extent))
    axes.figure.canvas.draw()
    axes = tr.plot.shifts(shifts - 0.5, solution)
    assert axes.get_xscale() == "linear"


def pairs_of(values, errors):
    values = jnp.asarray(values)
    vectors, count = jnp.zeros((*values.shape, 3)), jnp.asarray(5)
    bounds = jnp.zeros((*values.shape[:-1], 2))
    return tr.Eigenpairs(
        values, jnp.asarray(errors), values, bounds, vectors, count, tr.RESULTS.successful
    )


def test_a_density_with_extreme_eigenvalues():
    """Also one that lies off the grid, and one of which nothing is known."""
    grid = np.linspace(0, 1, 5)
    solution = solution_of(np.ones(5), 0.1 * np.ones(5), np.zeros(5))
    pairs = pairs_of([-0.5, 0.9, 0.2], [0.25, 0.01, np.inf])
    axes = tr.plot.spectral_density(grid, solution, eigenpairs=pairs)
    marks, _, (bars,) = axes.containers[0]
    np.testing.assert_allclose(marks.get_xdata(), [-0.5, 0.9, 0.2])
    ends = [segment[:, 0] for segment in bars.get_segments()]
    np.testing.assert_allclose(ends, [[-0.75, -0.25], [0.89, 0.91], [0.2, 0.2]], rtol=1e-6)
    assert axes.get_xlim() == pytest.approx((-0.77, 1))
    assert axes.get_ylim() == pytest.approx((0, 1.15 * 1.2))  # as without them
    assert "eigenvalues with errors" in words(axes)
    axes.figure.canvas.draw()


def test_traces_of_a_single_step():
    axes = tr.plot.traces([0], [solution_of(2.0, 0.1)])
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), [2.0])


def test_traces_by_layer():
    """A list of solutions, and one with an axis for the steps in front, are the same."""
    steps = np.array([0, 10, 20])
    values = {"a": np.array([1.0, 2, 3]), "b": {"w": np.array([5.0, 4, 6])}}
    errors = {"a": np.array([0.1, 0.2, np.inf]), "b": {"w": np.array([0.3, 0.2, 0.1])}}
    each = [
        dataclasses.replace(solution_of(0.0, 0.0), value=value, std_err=error)
        for value, error in (
            jtu.tree_map(lambda x, i=i: jnp.asarray(x[i]), (values, errors)) for i in range(3)
        )
    ]
    single = dataclasses.replace(solution_of(0.0, 0.0), value=values, std_err=errors)
    for found in (each, single):
        axes = tr.plot.traces(steps, found, exact=jtu.tree_map(lambda x: x + 1, values))
        a, exact_a, b, exact_b = (line.get_ydata() for line in axes.get_lines())
        np.testing.assert_allclose(a, values["a"], rtol=1e-6)
        np.testing.assert_allclose(b, values["b"]["w"], rtol=1e-6)
        np.testing.assert_allclose((exact_a, exact_b), (a + 1, b + 1), rtol=1e-6)
        assert words(axes) == ["a", "exact", "b/w"]
        corners = [
            {tuple(corner) for corner in np.round(band.get_paths()[0].vertices, 5)}
            for band in axes.collections
        ]
        assert {(0, 0.8), (0, 1.2), (10, 1.6), (10, 2.4), (20, 3)} <= corners[0]
        assert {(0, 4.4), (0, 5.6), (20, 5.8), (20, 6.2)} <= corners[1]
    whole = tr.plot.traces(steps, solution_of(np.ones(3), np.ones(3)))
    assert words(whole) == ["trace"]


def test_sharpness():
    """The largest eigenvalue, wherever it stands, its error, and the threshold of each step."""
    steps, rate = np.array([0, 1, 2]), np.array([0.0, 0.5, 0.1])
    values = np.array([[-1.0, 3], [-2, 5], [-3, 4]])
    errors = np.array([[9.0, 0.5], [9, 0.25], [9, np.inf]])
    each = [pairs_of(*pair) for pair in zip(values, errors, strict=True)]
    for pairs in (each, pairs_of(values, errors)):
        axes = tr.plot.sharpness(steps, pairs, rate, exact=values[:, 1] + 1)
        found, exact, threshold = (line.get_ydata() for line in axes.get_lines())
        np.testing.assert_allclose(found, [3, 5, 4])
        np.testing.assert_allclose(exact, [4, 6, 5])
        np.testing.assert_allclose(threshold, [np.nan, 4, 20])
        corners = {tuple(x) for x in np.round(axes.collections[0].get_paths()[0].vertices, 5)}
        assert {(0, 3.5), (1, 5.25), (2, 4), (0, 3), (1, 5)} <= corners
    assert words(axes) == ["its error", "sharpness", "exact", "2 / learning rate"]
    line = tr.plot.sharpness(steps, each, 0.2).get_lines()[-1]
    np.testing.assert_allclose(line.get_ydata(), 10)


@pytest.mark.variant
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
    density = solution_of(np.ones(3), np.ones(3), np.ones(3))
    with pytest.raises(TypeError, match=r"Expected a `traceax\.Eigenpairs`"):
        tr.plot.spectral_density(np.arange(3), density, eigenpairs=vector)
    with pytest.raises(TypeError, match=r"solutions of `traceax\.block_traces`"):
        tr.plot.traces(np.ones(1), [3])
    with pytest.raises(ValueError, match=r"one entry for each of these steps of shape \(2,\)"):
        tr.plot.traces(np.arange(2), [solution_of(1.0, 1.0)] * 3)
    with pytest.raises(ValueError, match=r"one number a layer at each step"):
        tr.plot.traces(np.arange(2), [vector, vector])
    with pytest.raises(ValueError, match="nothing to draw"):
        tr.plot.sharpness(np.arange(2), [], 0.1)
    with pytest.raises(TypeError, match=r"Expected a `traceax\.Eigenpairs`"):
        tr.plot.sharpness(np.arange(2), [vector, vector], 0.1)
