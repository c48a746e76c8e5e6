"""Pictures of solutions. Matplotlib (extra `plot`) is imported only when a picture is drawn."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ._estimators.solution import Solution
from ._functions.eigenpairs import Eigenpairs

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
    return values, _finite(reach), np.isfinite(values)


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


def _finite(error: Any) -> np.ndarray:
    """The error, or 0 where it is infinite: it is then drawn without a bar."""
    return np.where(np.isfinite(error), error, 0)


def _mark(axes: Any, ends: tuple[Any, Any], pairs: Eigenpairs) -> tuple[Any, Any]:
    """Mark eigenvalues on the axis, with their errors. Returns the ends of the axis with them."""
    values, errors = (np.asarray(x) for x in (_checked_pairs([pairs])[0].values, pairs.errors))
    reach = _finite(errors)
    axes.errorbar(
        values, np.full(values.shape, 0.04), xerr=reach, fmt="|", ms=16, mew=1.5, lw=1.5,
        capsize=3, color="C3", label="eigenvalues with errors",
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip
    margin = 0.02 * (ends[1] - ends[0])
    low, high = np.min(values - reach) - margin, np.max(values + reach) + margin
    return min(ends[0], low), max(ends[1], high)


def _checked_pairs(pairs: Sequence[Eigenpairs]) -> Sequence[Eigenpairs]:
    for each in pairs:
        if not isinstance(each, Eigenpairs):
            raise TypeError(
                f"Expected a `traceax.Eigenpairs`, got {each!r}. Give what `traceax.eigenpairs` "
                "returns."
            )
    return pairs


def spectral_density(
    grid: ArrayLike,
    solution: Solution,
    *,
    eigenpairs: Eigenpairs | None = None,
    exact: ArrayLike | None = None,
    axes: Any = None,
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
    - `eigenpairs`: what [`traceax.eigenpairs`][] found for this operator. The eigenvalues are
        marked at the bottom, with bars as wide as their errors.
    - `exact`: the exact density on the same grid, if it is known.
    - `axes`: the matplotlib axes to draw on, linear or logarithmic; by default those of a new
        figure.

    **Returns:**

    The axes; their figure is `axes.figure`.

    **Raises:**

    - `ImportError`: without matplotlib.
    - `TypeError`: if `eigenpairs` are none.
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
    ends = grid[0], grid[-1]
    if eigenpairs is not None:
        ends = _mark(axes, ends, eigenpairs)
    axes.set(xlim=ends, ylim=(bottom, top), xlabel="eigenvalue", ylabel="density")
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


def _over_steps(steps: ArrayLike, found: list[Any], *fields: str) -> tuple[np.ndarray, list[Any]]:
    """The steps, and these fields with an axis for them in front: of a single object that has it
    (from a scan), or of one object for each step.
    """
    x = np.asarray(steps)
    trees = [[getattr(each, name) for name in fields] for each in found]
    stacked = jtu.tree_map(np.asarray, trees[0])
    if len(trees) > 1 or any(leaf.shape[:1] != x.shape for leaf in jtu.tree_leaves(stacked)):
        stacked = jtu.tree_map(lambda *each: np.stack(each), *trees)
    shapes = [leaf.shape for leaf in jtu.tree_leaves(stacked)]
    if x.ndim != 1 or any(shape[:1] != x.shape for shape in shapes):
        raise ValueError(
            f"Expected one entry for each of these steps of shape {x.shape}, got {len(found)} "
            f"solution(s) with arrays of shapes {shapes}. Give a list with a solution for each "
            "step, or a single solution with an axis for them in front, as `jax.lax.scan` makes it."
        )
    return x, stacked


def traces(
    steps: ArrayLike,
    solutions: Solution | Sequence[Solution],
    *,
    exact: PyTree | None = None,
    axes: Any = None,
) -> Any:
    """Draw traces through training, one curve for each layer, with bands of two standard errors.

    !!! Example

        ```python
        found = [tr.block_traces(key, curvature(params, batch), k=20) for key, params in looks]
        axes = tr.plot.traces(steps, found)
        axes.figure.savefig("layers.png")
        ```

    **Arguments:**

    - `steps`: the steps of training, one-dimensional.
    - `solutions`: what [`traceax.block_traces`][] or [`traceax.trace`][] returned at each of these
        steps, or a single solution with an axis for the steps in front, as `jax.lax.scan` makes it.
    - `exact`: the exact traces, if they are known: a PyTree like the value of the single solution.
    - `axes`: the matplotlib axes to draw on, linear or logarithmic; by default those of a new
        figure.

    **Returns:**

    The axes; their figure is `axes.figure`.

    **Raises:**

    - `ImportError`: without matplotlib.
    - `TypeError`, `ValueError`: for anything but solutions with one number a layer at each step.
    """
    found = [solutions] if isinstance(solutions, Solution) else list(solutions)
    if not found or not all(isinstance(each, Solution) for each in found):
        raise TypeError(
            f"Expected solutions of `traceax.block_traces` or `traceax.trace`, got {solutions!r}."
        )
    axes = _axes(axes)
    x, (values, std_errs) = _over_steps(steps, found, "value", "std_err")
    curves = jtu.tree_leaves_with_path(values)
    if any(value.ndim != 1 for _, value in curves):
        raise ValueError(
            f"Expected one number a layer at each step, got shapes {[v.shape for _, v in curves]}. "
            "Give solutions of `traceax.block_traces`, or of `traceax.trace`."
        )
    truths = [None] * len(curves) if exact is None else jtu.tree_leaves(exact)
    errors = jtu.tree_leaves(std_errs)
    for i, ((path, value), error) in enumerate(zip(curves, errors, strict=True)):
        name, color = jtu.keystr(path, simple=True, separator="/") or "trace", f"C{i % 10}"
        value, reach = np.real(value), 2 * _finite(error)
        axes.fill_between(
            x, value - reach, value + reach, color=color, alpha=0.25, linewidth=0
        )  # fmt: skip
        axes.plot(x, value, color=color, label=name)
        if truths[i] is not None:
            label = "exact" if i == 0 else None
            axes.plot(x, truths[i], color="black", linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="trace, with two standard errors")
    axes.margins(x=0)
    axes.legend(frameon=False, ncols=1 + len(curves) // 6)
    return axes


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

    !!! Example

        ```python
        pairs = [tr.eigenpairs(key, curvature(params, batch), k=20) for key, params in looks]
        axes = tr.plot.sharpness(steps, pairs, learning_rate=0.1)
        axes.figure.savefig("sharpness.png")
        ```

    The value is the largest Ritz value; the eigenvalue lies in the band above, which is as high as
    the error (but for a probability of 1 %).

    **Arguments:**

    - `steps`: the steps of training, one-dimensional.
    - `pairs`: what [`traceax.eigenpairs`][] returned at each of these steps, or a single one with
        an axis for the steps in front, as `jax.lax.scan` makes it.
    - `learning_rate`: a number, or one for each step. The threshold is drawn where it is positive.
    - `exact`: the exact eigenvalues, if they are known.
    - `axes`: the matplotlib axes to draw on, linear or logarithmic; by default those of a new
        figure.

    **Returns:**

    The axes; their figure is `axes.figure`.

    **Raises:**

    - `ImportError`: without matplotlib.
    - `TypeError`, `ValueError`: for anything but eigenpairs at each step.
    """
    found = _checked_pairs([pairs] if isinstance(pairs, Eigenpairs) else list(pairs))
    if not found:
        raise ValueError(f"There is nothing to draw in {pairs!r}: give one for each step.")
    axes = _axes(axes)
    x, (values, errors) = _over_steps(steps, list(found), "values", "errors")
    largest = np.argmax(values, axis=-1)[..., None]
    value, error = (np.take_along_axis(v, largest, axis=-1)[..., 0] for v in (values, errors))
    rate = np.broadcast_to(np.asarray(learning_rate, float), x.shape)
    threshold = np.where(rate > 0, 2 / np.where(rate > 0, rate, 1), np.nan)
    axes.fill_between(
        x, value, value + _finite(error), color="C0", alpha=0.3, linewidth=0, label="its error"
    )
    axes.plot(x, value, "o-", ms=3, lw=1.5, color="C0", label="sharpness")
    if exact is not None:
        axes.plot(x, exact, color="black", linestyle="--", linewidth=1, label="exact")
    axes.plot(x, threshold, color="C3", linestyle="--", linewidth=1.5, label="2 / learning rate")
    axes.set(xlabel="step", ylabel="largest eigenvalue")
    axes.margins(x=0)
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
