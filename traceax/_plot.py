"""Pictures of solutions. Matplotlib is imported when one is drawn, and only then."""

from typing import Any

import numpy as np
from jax.typing import ArrayLike

from ._spectral import DensityCurve

PICTURES = (".png", ".pdf", ".svg")  # kinds of files


def require_matplotlib() -> None:
    """Raise an `ImportError` that says what to do, unless matplotlib is there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Drawing needs matplotlib, which is not installed: `pip install matplotlib`, or the "
            "extra `traceax[plot]`."
        ) from error


def plot_density(
    curve: DensityCurve, *, exact: ArrayLike | None = None, title: str | None = None
) -> Any:
    """Draw a spectral density with its errors.

    **Arguments:**

    - `curve`: the density.
    - `exact`: the exact density on the same grid, if it is known.
    - `title`: the title.

    **Returns:**

    A `matplotlib.figure.Figure`.

    **Raises:**

    - `ImportError`: without matplotlib.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    grid, value, std_err, quadrature_error = map(
        np.asarray,
        (curve.grid, curve.solution.value, curve.solution.std_err, curve.solution.quadrature_error),
    )
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    # The quadrature error may exceed everything: it does not decide the scale.
    top = 1.15 * np.max(value + 2 * std_err)
    bands = {
        "two standard errors and quadrature error": (2 * std_err + quadrature_error, 0.15),
        "two standard errors": (2 * std_err, 0.3),
    }
    for label, (error, opacity) in bands.items():
        low, high = np.clip([value - error, value + error], 0, 2 * top)
        axes.fill_between(grid, low, high, color="C0", alpha=opacity, linewidth=0, label=label)
    axes.plot(grid, value, color="C0", label="estimate")
    if exact is not None:
        axes.plot(grid, exact, color="black", linestyle="--", linewidth=1, label="exact")
    axes.set(xlim=(grid[0], grid[-1]), ylim=(0, top), xlabel="eigenvalue", title=title)
    axes.set_ylabel(f"density (Gaussians of width {float(curve.width):.3g})")
    axes.legend(frameon=False)
    return figure


def save(figure: Any, file: Any, suffix: str) -> None:
    """Write a figure.

    **Arguments:**

    - `figure`: the figure.
    - `file`: an open binary file.
    - `suffix`: one of `PICTURES`.
    """
    figure.savefig(file, format=suffix.lower().removeprefix("."), dpi=150)
