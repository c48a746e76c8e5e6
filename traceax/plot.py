"""Pictures of solutions. Matplotlib (extra `plot`) is imported only when a picture is drawn."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from ._estimators.solution import Solution

PICTURES = (".png", ".pdf", ".svg")  # the kinds of files that a picture can be written to


def require_matplotlib() -> None:
    """Raise an `ImportError` that says what to do, unless matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Drawing needs matplotlib, which is not installed: `pip install matplotlib`, or the "
            "extra `traceax[plot]`."
        ) from error


def _axes(axes: Any, height: float = 4.0) -> Any:
    """These axes, or those of a new figure. (A `Figure` of its own, unlike one of pyplot, opens no
    window and need not be closed.)
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(7, height), layout="constrained").subplots() if axes is None else axes


def _checked(solutions: Sequence[Solution]) -> Sequence[Solution]:
    if not solutions:
        raise ValueError(f"There is nothing to draw in {solutions!r}: give at least one solution.")
    for solution in solutions:
        if not isinstance(solution, Solution):
            raise TypeError(
                f"Expected a `traceax.Solution`, got {solution!r}. Give what `traceax.trace`, or a "
                "function like it, returns."
            )
        if np.ndim(solution.value) != 0:
            raise ValueError(
                f"Expected solutions with a single number, got shape {np.shape(solution.value)}. "
                "Densities have a picture of their own, `traceax.plot.spectral_density`."
            )
    return solutions


def _ends(solutions: Sequence[Solution], level: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The values (their real parts), how far the intervals reach below and above them, and which
    values are finite.
    """
    values = np.array([np.real(solution.value) for solution in solutions])
    intervals = np.array([solution.interval(level) for solution in solutions]).T
    reach = np.abs(intervals - values)
    # An infinite interval is drawn without bars.
    return values, np.where(np.isfinite(reach), reach, 0), np.isfinite(values)


def _bands(axes: Any, x: Any, value: Any, std_err: Any, quadrature_error: Any, ends: Any) -> None:
    """Both errors of a curve as bands around it, cut off at these ends."""
    bands = {
        "two standard errors and quadrature error": (2 * std_err + quadrature_error, 0.15),
        "two standard errors": (2 * std_err, 0.3),
    }
    for label, (error, opacity) in bands.items():
        low, high = np.clip([value - error, value + error], *ends)
        axes.fill_between(x, low, high, color="C0", alpha=opacity, linewidth=0, label=label)


def _curve(axes: Any, x: Any, value: Any, exact: ArrayLike | None) -> None:
    """A curve, and the exact one beside it."""
    axes.plot(x, value, color="C0", label="estimate")
    if exact is not None:
        axes.plot(x, exact, color="black", linestyle="--", linewidth=1, label="exact")


def spectral_density(
    grid: ArrayLike, solution: Solution, *, exact: ArrayLike | None = None, axes: Any = None
) -> Any:
    """Draw a spectral density with its errors.

    !!! Example

        ```python
        solution = tr.spectral_density(key, operator, k=100, grid=grid)
        axes = tr.plot.spectral_density(grid, solution)
        axes.figure.savefig("density.png")
        ```

    **Arguments:**

    - `grid`: the grid.
    - `solution`: the solution of [`traceax.spectral_density`][] on this grid.
    - `exact`: the exact density on the same grid, if it is known.
    - `axes`: the matplotlib axes to draw on, linear or logarithmic; by default those of a new
        figure.

    **Returns:**

    The axes; their figure is `axes.figure`.

    **Raises:**

    - `ImportError`: without matplotlib.
    - `ValueError`: if the solution is not that of a spectral density on this grid.
    """
    axes = _axes(axes)
    grid, value = np.asarray(grid), np.asarray(solution.value)
    if grid.ndim != 1 or value.shape != grid.shape or solution.quadrature_error is None:
        raise ValueError(
            f"Expected the solution of `traceax.spectral_density` on this grid of shape "
            f"{grid.shape}, got a value of shape {value.shape}. Give the grid of that call."
        )
    std_err, quadrature_error = map(np.asarray, (solution.std_err, solution.quadrature_error))
    # The quadrature error may be much larger than the density, and so does not set the scale.
    top = 1.15 * np.max(value + 2 * std_err)
    _bands(axes, grid, value, std_err, quadrature_error, (0, 2 * top))
    _curve(axes, grid, value, exact)
    bottom = None if axes.get_yscale() == "log" else 0
    axes.set(xlim=(grid[0], grid[-1]), ylim=(bottom, top), xlabel="eigenvalue", ylabel="density")
    axes.legend(frameon=False)
    return axes


def shifts(
    shifts: ArrayLike, solution: Solution, *, exact: ArrayLike | None = None, axes: Any = None
) -> Any:
    """Draw a function of the shift, such as log det(A + s I), with its errors.

    !!! Example

        ```python
        noise = jnp.logspace(-3, 0, 20)
        solution = tr.logdet(key, operator, k=100, shifts=noise)
        axes = tr.plot.shifts(noise, solution)
        axes.figure.savefig("log-determinants.png")
        ```

    **Arguments:**

    - `shifts`: the shifts, one-dimensional. Their axis is logarithmic if all are positive.
    - `solution`: the solution of [`traceax.logdet`][] or [`traceax.spectral_sum`][] for them.
    - `exact`: the exact values, if they are known.
    - `axes`: the matplotlib axes to draw on; by default those of a new figure.

    **Returns:**

    The axes; their figure is `axes.figure`.

    **Raises:**

    - `ImportError`: without matplotlib.
    - `ValueError`: if the solution is not one for these shifts.
    """
    axes = _axes(axes)
    values = np.asarray(solution.value)
    order = np.argsort(np.asarray(shifts), axis=None)
    if np.ndim(shifts) != 1 or values.shape != np.shape(shifts):
        raise ValueError(
            f"Expected a solution for these shifts of shape {np.shape(shifts)}, got a value of "
            f"shape {values.shape}. Give the `shifts` of that call, a one-dimensional array."
        )
    x, value, std_err, quadrature_error = (
        np.asarray(each)[order]
        for each in (shifts, values, solution.std_err, solution.quadrature_error)
    )
    # An error without bounds is drawn as far as the curve reaches.
    extent = np.max(value + 2 * std_err) - np.min(value - 2 * std_err)
    ends = np.min(value) - extent, np.max(value) + extent
    _bands(axes, x, value, std_err, quadrature_error, ends)
    _curve(axes, x, value, None if exact is None else np.asarray(exact)[order])
    if x[0] > 0:
        axes.set_xscale("log")
    axes.set(xlabel="shift", ylabel="estimate")
    axes.legend(frameon=False)
    return axes


def convergence(
    solutions: Sequence[Solution],
    *,
    truth: ArrayLike | None = None,
    level: float = 0.95,
    label: str | None = None,
    axes: Any = None,
) -> Any:
    """Draw estimates with their intervals against the number of products that they took.

    Call it again with the same axes to compare estimators.

    !!! Example

        ```python
        solutions = [tr.trace(key, operator, k) for k in (20, 40, 80, 160)]
        axes = tr.plot.convergence(solutions, truth=exact, label="XTrace")
        ```

    **Arguments:**

    - `solutions`: solutions whose values are single numbers.
    - `truth`: the exact value, if it is known.
    - `level`: the level of the intervals, see [`traceax.Solution`][].
    - `label`: a name for the legend.
    - `axes`: the matplotlib axes to draw on; by default those of a new figure.

    **Returns:**

    The axes; their figure is `axes.figure`.

    **Raises:**

    - `ImportError`: without matplotlib.
    - `TypeError`, `ValueError`: for anything but solutions whose values are single numbers.
    """
    solutions, axes = _checked(solutions), _axes(axes)
    products = np.array([int(solution.num_matvecs) for solution in solutions])
    values, reach, finite = _ends(solutions, level)
    axes.errorbar(
        products[finite], values[finite], yerr=reach[:, finite], fmt="o-", ms=4, capsize=3,
        label=label or f"estimate, {100 * level:g} % intervals",
    )  # fmt: skip
    if truth is not None:
        axes.axhline(np.real(truth), color="black", linestyle="--", linewidth=1, label="exact")
    axes.set(xlabel="products", ylabel="estimate")
    if np.min(products) > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(products, [str(k) for k in products])
        axes.minorticks_off()
    axes.legend(frameon=False)
    return axes


def interval(
    solutions: Mapping[str, Solution],
    *,
    truth: ArrayLike | None = None,
    level: float = 0.95,
    axes: Any = None,
) -> Any:
    """Draw estimates with their intervals, one below the other, with their names.

    !!! Example

        ```python
        axes = tr.plot.interval({"k = 50": tr.trace(key, operator, 50)}, truth=exact)
        ```

    **Arguments:**

    - `solutions`: solutions whose values are single numbers, by their names.
    - `truth`: the exact value, if it is known.
    - `level`: the level of the intervals, see [`traceax.Solution`][].
    - `axes`: the matplotlib axes to draw on; by default those of a new figure.

    **Returns:**

    The axes; their figure is `axes.figure`.

    **Raises:**

    - `ImportError`: without matplotlib.
    - `TypeError`, `ValueError`: for anything but solutions whose values are single numbers.
    """
    found = _checked(list(solutions.values()))
    axes = _axes(axes, height=1.2 + 0.4 * len(found))
    values, reach, finite = _ends(found, level)
    rows = np.arange(len(found))[::-1]
    axes.errorbar(
        values[finite], rows[finite], xerr=reach[:, finite], fmt="o", ms=5, capsize=4,
        label=f"{100 * level:g} % intervals",
    )  # fmt: skip
    if truth is not None:
        axes.axvline(np.real(truth), color="black", linestyle="--", linewidth=1, label="exact")
    axes.set_yticks(rows, list(solutions))
    axes.set(ylim=(-0.6, len(found) - 0.4), xlabel="estimate")
    axes.legend(frameon=False, loc="best")
    return axes
