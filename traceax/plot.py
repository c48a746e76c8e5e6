"""Pictures of solutions. Matplotlib (extra `plot`) is imported only when a picture is drawn.

All functions draw on the matplotlib axes `axes`, by default those of a new figure, and return them;
their figure is `axes.figure`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike

from ._estimators.solution import Solution
from ._functions.eigenpairs import Eigenpairs

_EXACT = {"color": "black", "linestyle": "--", "linewidth": 1, "label": "exact"}
_MARKS = {"fmt": "|", "ms": 16, "mew": 1.5, "lw": 1.5, "capsize": 3, "color": "C3"}


def _axes(axes: Any, height: float = 4.0) -> Any:
    """These axes, or those of a new figure, which opens no window and need not be closed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(7, height), layout="constrained").subplots() if axes is None else axes


def _labelled(axes: Any, x: str, y: str | None = None, columns: int = 1) -> Any:
    axes.set(xlabel=x, ylabel=y)
    axes.legend(frameon=False, ncols=columns)
    return axes


def _finite(error: Any) -> np.ndarray:
    """The error, or 0 where it is infinite: it is then drawn without a bar."""
    return np.where(np.isfinite(error), error, 0)


def _band(axes: Any, x: Any, low: Any, high: Any, **style: Any) -> None:
    style = {"color": "C0", "alpha": 0.3, "linewidth": 0} | style
    axes.fill_between(x, low, high, **style)


def _curve(axes: Any, x: Any, solution: Solution, exact: Any) -> float:
    """Values with both errors as bands around them, and the exact values. Returns their top."""
    value = np.asarray(solution.value)
    inner = 2 * np.asarray(solution.std_err)
    # An error without bounds is drawn as far as the curve reaches.
    extent = np.max(value + inner) - np.min(value - inner)
    outer = np.minimum(inner + np.asarray(solution.quadrature_error), extent)
    _band(axes, x, value - inner, value + inner, label="two standard errors")
    _band(axes, x, value - outer, value + outer, label="with the quadrature error", alpha=0.15)
    axes.plot(x, value, color="C0", label="estimate")
    if exact is not None:
        axes.plot(x, exact, **_EXACT)
    return np.max(value + inner)


def spectral_density(
    grid: ArrayLike,
    solution: Solution,
    *,
    eigenpairs: Eigenpairs | None = None,
    exact: ArrayLike | None = None,
    axes: Any = None,
) -> Any:
    """Draw a spectral density with its errors.

    **Arguments:**

    - `grid`: the grid, one-dimensional.
    - `solution`: the solution of [`traceax.spectral_density`][] on this grid.
    - `eigenpairs`: what [`traceax.eigenpairs`][] returned for this operator. The eigenvalues are
        marked at the bottom, with bars as wide as their errors.
    - `exact`: the exact density on the same grid, if it is known.
    - `axes`: the matplotlib axes, linear or logarithmic; by default those of a new figure.

    **Returns:** the axes.
    """
    axes = _axes(axes)
    # The quadrature error may be much larger than the density, and so does not set the scale.
    top = 1.15 * _curve(axes, grid, solution, exact)
    low, high = np.asarray(grid)[[0, -1]]
    if eigenpairs is not None:
        values = np.asarray(eigenpairs.values)
        reach = _finite(eigenpairs.errors)
        axes.errorbar(values, 0 * values + 0.04, xerr=reach, label="eigenvalues with errors",
                      transform=axes.get_xaxis_transform(), **_MARKS)  # fmt: skip
        margin = 0.02 * (high - low)
        low = min(low, np.min(values - reach) - margin)
        high = max(high, np.max(values + reach) + margin)
    axes.set(xlim=(low, high), ylim=(None if axes.get_yscale() == "log" else 0, top))
    return _labelled(axes, "eigenvalue", "density")


def shifts(
    shifts: ArrayLike, solution: Solution, *, exact: ArrayLike | None = None, axes: Any = None
) -> Any:
    """Draw a function of the shift, such as log det(A + s I), with its errors.

    **Arguments:**

    - `shifts`: the shifts, one-dimensional and in order. Their axis is logarithmic if all are
        positive.
    - `solution`: the solution of [`traceax.logdet`][] or [`traceax.spectral_sum`][] for them.
    - `exact`: the exact values, if they are known.
    - `axes`: the matplotlib axes; by default those of a new figure.

    **Returns:** the axes.
    """
    axes = _axes(axes)
    _curve(axes, shifts, solution, exact)
    axes.set_xscale("log" if np.min(shifts) > 0 else "linear")
    return _labelled(axes, "shift", "estimate")


def _over_steps(results: Any, *names: str) -> list[Any]:
    """These fields of results, with the steps as the first axis."""
    if not isinstance(results, Sequence):
        return jtu.tree_map(np.asarray, [getattr(results, name) for name in names])
    fields = [[getattr(result, name) for name in names] for result in results]
    return jtu.tree_map(lambda *leaves: np.stack(leaves), *fields)


def traces(
    steps: ArrayLike,
    solutions: Solution | Sequence[Solution],
    *,
    exact: Any = None,
    axes: Any = None,
) -> Any:
    """Draw traces through training, one curve for each layer, with bands of two standard errors.

    **Arguments:**

    - `steps`: the steps of training, one-dimensional.
    - `solutions`: what [`traceax.block_traces`][] or [`traceax.trace`][] returned at each of these
        steps, or a single solution with an axis for the steps in front, as `jax.lax.scan` makes it.
    - `exact`: the exact traces, if they are known: a PyTree like the value of the single solution.
    - `axes`: the matplotlib axes, linear or logarithmic; by default those of a new figure.

    **Returns:** the axes.
    """
    axes = _axes(axes)
    values, std_errs = _over_steps(solutions, "value", "std_err")
    curves = jtu.tree_leaves_with_path(values)
    for i, (path, value) in enumerate(curves):
        reach = 2 * _finite(jtu.tree_leaves(std_errs)[i])
        _band(axes, steps, value.real - reach, value.real + reach, color=f"C{i % 10}")
        label = jtu.keystr(path, simple=True, separator="/") or "trace"
        axes.plot(steps, value.real, color=f"C{i % 10}", label=label)
    for i, value in enumerate(jtu.tree_leaves(exact)):
        axes.plot(steps, value, **{**_EXACT, "label": None if i else "exact"})
    axes.margins(x=0)
    return _labelled(axes, "step", "trace, with two standard errors", 1 + len(curves) // 6)


def sharpness(
    steps: ArrayLike,
    pairs: Eigenpairs | Sequence[Eigenpairs],
    learning_rate: ArrayLike,
    *,
    exact: ArrayLike | None = None,
    axes: Any = None,
) -> Any:
    """Draw the largest eigenvalue of the Hessian through training against 2 / learning rate, above
    which gradient descent is not stable.

    The value is the largest Ritz value; with a probability of 99 % the eigenvalue lies in the band
    above, which is as high as the error.

    **Arguments:**

    - `steps`: the steps of training, one-dimensional.
    - `pairs`: what [`traceax.eigenpairs`][] returned at each of these steps, or a single one with
        an axis for the steps in front, as `jax.lax.scan` makes it.
    - `learning_rate`: a number, or one for each step. The threshold is drawn where it is positive.
    - `exact`: the exact eigenvalues, if they are known.
    - `axes`: the matplotlib axes, linear or logarithmic; by default those of a new figure.

    **Returns:** the axes.
    """
    axes = _axes(axes)
    values, errors = _over_steps(pairs, "values", "errors")
    largest = np.argmax(values, axis=-1)[..., None]
    value = np.take_along_axis(values, largest, axis=-1)[..., 0]
    error = _finite(np.take_along_axis(errors, largest, axis=-1)[..., 0])
    threshold = 2 / np.where(np.asarray(learning_rate) > 0, learning_rate, np.nan) + 0 * value
    _band(axes, steps, value, value + error, label="its error")
    axes.plot(steps, value, "o-", ms=3, lw=1.5, color="C0", label="sharpness")
    if exact is not None:
        axes.plot(steps, exact, **_EXACT)
    axes.plot(steps, threshold, color="C3", linestyle="--", label="2 / learning rate")
    axes.margins(x=0)
    return _labelled(axes, "step", "largest eigenvalue")


def interval(
    solutions: Mapping[str, Solution], *, truth: Any = None, level: float = 0.95, axes: Any = None
) -> Any:
    """Draw estimates with their intervals, one below the other, with their names.

    **Arguments:**

    - `solutions`: solutions whose values are single numbers, by their names.
    - `truth`: the exact value, if it is known.
    - `level`: the level of the intervals, see [`traceax.Solution`][].
    - `axes`: the matplotlib axes; by default those of a new figure.

    **Returns:** the axes.
    """
    axes = _axes(axes, height=1.2 + 0.4 * len(solutions))
    values = np.array([np.real(solution.value) for solution in solutions.values()])
    intervals = np.array([solution.interval(level) for solution in solutions.values()]).T
    reach = _finite(np.abs(intervals - values))
    rows = np.arange(len(solutions))[::-1]
    label = f"{100 * level:g} % intervals"
    axes.errorbar(values, rows, xerr=reach, fmt="o", ms=5, capsize=4, label=label)
    if truth is not None:
        axes.axvline(np.real(truth), **_EXACT)
    axes.set(yticks=rows, yticklabels=list(solutions), ylim=(-0.6, len(solutions) - 0.4))
    return _labelled(axes, "estimate")
