"""Pictures: what is drawn where."""

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from matplotlib.figure import Figure

import traceax as tr

GRID = np.linspace(0, 1, 5)


def solution_of(value, std_err, quadrature_error=None):
    arrays = jtu.tree_map(jnp.asarray, (value, std_err, 10, {"dof": 9}))
    error = None if quadrature_error is None else jnp.asarray(quadrature_error)
    return tr.Solution(*arrays, tr.RESULTS.successful, error)


def pairs_of(values, errors):
    values = jnp.asarray(values)
    rest = jnp.zeros((*values.shape[:-1], 2)), jnp.zeros((*values.shape, 3)), jnp.asarray(5)
    return tr.Eigenpairs(values, jnp.asarray(errors), values, *rest, tr.RESULTS.successful)


def words(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def corners(band):
    return {tuple(corner) for corner in np.round(band.get_paths()[0].vertices, 4)}


def test_a_density_with_its_errors_and_extreme_eigenvalues():
    """The quadrature error does not decide the scale; an eigenvalue off the grid does."""
    value, std_err = np.array([1.0, 1, 5, 2, 1]), np.array([0.1, 0.2, 0.7, 0.2, 0.1])
    solution = solution_of(value, std_err, np.array([0.0, 0.3, 9, 0.2, np.inf]))
    pairs = pairs_of([-0.5, 0.9, 0.2], [0.25, 0.01, np.inf])
    axes = tr.plot.spectral_density(GRID, solution, eigenpairs=pairs, exact=2 * value)
    np.testing.assert_allclose(axes.get_xlim(), (-0.77, 1))
    np.testing.assert_allclose(axes.get_ylim(), (0, 1.15 * 6.4), rtol=1e-6)
    inner, outer = map(corners, axes.collections[:2])
    reach = 5.8  # of the curve with two standard errors: from 0.6 to 6.4
    assert {(0.25, 1.7), (0.25, 0.3), (0.5, 5 + reach), (1, 1 + reach)} <= outer
    assert {(0.25, 1.4), (0.25, 0.6), (0.5, 6.4), (1, 1.2)} <= inner
    estimate, exact = axes.get_lines()[:2]
    np.testing.assert_array_equal(estimate.get_xydata(), np.stack([GRID, value], axis=1))
    np.testing.assert_array_equal(exact.get_ydata(), 2 * value)
    marks, _, (bars,) = axes.containers[0]
    np.testing.assert_allclose(marks.get_xdata(), [-0.5, 0.9, 0.2])
    ends = [segment[:, 0] for segment in bars.get_segments()]
    np.testing.assert_allclose(ends, [[-0.75, -0.25], [0.89, 0.91], [0.2, 0.2]], rtol=1e-6)
    assert words(axes)[2:] == ["estimate", "exact", "eigenvalues with errors"]
    axes.figure.canvas.draw()


def test_a_density_on_a_logarithmic_axis():
    """Zeros, and errors that reach below, are left out without a warning."""
    axes = Figure().subplots()
    axes.set_yscale("log")
    solution = solution_of(np.array([0.0, 0.5, 4, 1e-3, 0]), 0.6 * np.ones(5), np.zeros(5))
    assert tr.plot.spectral_density(GRID, solution, axes=axes) is axes
    low, high = axes.get_ylim()
    assert 0 < low <= 0.5
    np.testing.assert_allclose(high, 1.15 * (4 + 1.2), rtol=1e-6)
    axes.figure.canvas.draw()


def test_a_curve_over_shifts():
    shifts, value = np.array([0.01, 0.1, 1]), np.array([2.0, 5, 9])
    solution = solution_of(value, np.array([0.5, 0.2, 0.1]), np.zeros(3))
    axes = tr.plot.shifts(shifts, solution, exact=value + 1)
    assert (axes.get_xlabel(), axes.get_xscale()) == ("shift", "log")
    np.testing.assert_array_equal(axes.get_lines()[1].get_ydata(), value + 1)
    assert tr.plot.shifts(shifts - 0.5, solution).get_xscale() == "linear"


def test_traces_by_layer():
    """A list of solutions, and one with an axis for the steps in front, are the same."""
    values = {"a": np.array([1.0, 2, 3]), "b": {"w": np.array([5.0, 4, 6])}}
    errors = {"a": np.array([0.1, 0.2, np.inf]), "b": {"w": np.array([0.3, 0.2, 0.1])}}
    steps = [jtu.tree_map(lambda x, i=i: x[i], (values, errors)) for i in range(3)]
    for solutions in ([solution_of(*step) for step in steps], solution_of(values, errors)):
        exact = jtu.tree_map(lambda x: x + 1, values)
        axes = tr.plot.traces(np.array([0, 10, 20]), solutions, exact=exact)
        lines = [line.get_ydata() for line in axes.get_lines()]
        a, b = values["a"], values["b"]["w"]
        np.testing.assert_allclose(lines, [a, b, a + 1, b + 1], rtol=1e-6)
        assert words(axes) == ["a", "b/w", "exact"]
        assert {(0, 0.8), (0, 1.2), (10, 1.6), (20, 3)} <= corners(axes.collections[0])
        assert {(0, 4.4), (0, 5.6), (20, 5.8), (20, 6.2)} <= corners(axes.collections[1])
    assert words(tr.plot.traces([0], [solution_of(2.0, 0.1)])) == ["trace"]


def test_sharpness():
    """The largest eigenvalue, wherever it stands, its error, and the threshold of each step."""
    values = np.array([[-1.0, 3], [-2, 5], [-3, 4]])
    errors = np.array([[9.0, 0.5], [9, 0.25], [9, np.inf]])
    each = [pairs_of(*pair) for pair in zip(values, errors, strict=True)]
    for pairs in (each, pairs_of(values, errors)):
        rate = np.array([0.0, 0.5, 0.1])
        axes = tr.plot.sharpness([0, 1, 2], pairs, rate, exact=values[:, 1] + 1)
        lines = [line.get_ydata() for line in axes.get_lines()]
        np.testing.assert_allclose(lines, [[3, 5, 4], [4, 6, 5], [np.nan, 4, 20]])
        assert {(0, 3), (0, 3.5), (1, 5.25), (2, 4)} <= corners(axes.collections[0])
    assert words(axes) == ["its error", "sharpness", "exact", "2 / learning rate"]
    threshold = tr.plot.sharpness([0, 1, 2], each, 0.2).get_lines()[-1].get_ydata()
    np.testing.assert_allclose(threshold, [10, 10, 10])


def test_intervals():
    """With one that says nothing, one that is NaN, and one that is exact."""
    solutions = {
        "good": solution_of(2.0, 0.1),
        "single": solution_of(3.0, jnp.inf),
        "failed": solution_of(jnp.nan, jnp.nan),
        "exact": solution_of(2.5, 0.0),
    }
    axes = tr.plot.interval(solutions, truth=2.5, level=0.9)
    line, _, (bars,) = axes.containers[0]
    np.testing.assert_allclose(line.get_xydata()[[0, 1, 3]], [[2, 3], [3, 2], [2.5, 0]])
    good, single, exact = (bars.get_segments()[i][:, 0] for i in (0, 1, 3))
    np.testing.assert_allclose(good, solutions["good"].interval(0.9), rtol=1e-6)
    np.testing.assert_allclose([single, exact], [[3, 3], [2.5, 2.5]])
    assert [label.get_text() for label in axes.get_yticklabels()] == list(solutions)
    assert words(axes) == ["exact", "90 % intervals"]
    axes.figure.canvas.draw()
