"""`traceax density`."""

import argparse
from pathlib import Path

import jax
import numpy as np

import traceax as tr

from .._functions.spectral import density_on_interval
from ..plot import spectral_density
from .common import (
    Command,
    Report,
    Rows,
    add_output,
    add_plot,
    add_steps,
    add_tag,
    aligned,
    begin_report,
    check_exact,
    check_output,
    check_plot,
    number,
    positive,
    real,
    timed,
    write_columns,
    write_plot,
)
from .functions import read_hermitian

_COLUMNS = ("grid", "density", "std_err", "quadrature_error", "exact")
_MOST_ROWS = 25  # the most rows that the table shows


def _add_arguments(command: argparse.ArgumentParser) -> None:
    add_tag(command)
    add_steps(command)
    command.add_argument(
        "--points", type=positive, default=200, metavar="N", help="of the grid (default 200)"
    )
    command.add_argument(
        "--range",
        type=real,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="the ends of the grid (default: it spans the spectrum, which a quarter of the "
        "matvecs, at most 30, find out)",
    )
    command.add_argument(
        "--width",
        type=real,
        metavar="W",
        help="standard deviation of the Gaussian that replaces each eigenvalue (default: what the "
        "Lanczos steps resolve)",
    )
    add_output(command, "grid, density, standard and quadrature errors")
    add_plot(command)


def _check_arguments(arguments: argparse.Namespace) -> None:
    check_output(arguments.output)
    if arguments.width is not None and arguments.width <= 0:
        raise ValueError(f"--width must be positive, got {arguments.width:g}.")
    if arguments.range is not None and arguments.range[0] >= arguments.range[1]:
        ends = " ".join(f"{end:g}" for end in arguments.range)
        raise ValueError(f"--range needs two ends, the smaller one first, got {ends}.")
    if arguments.points < 2:
        raise ValueError(
            f"--points must be at least 2 (a grid has two ends), got {arguments.points}."
        )
    check_plot(arguments.plot)


def _run(arguments: argparse.Namespace) -> tuple[Report, str]:
    _check_arguments(arguments)
    operator = read_hermitian(arguments)
    check_exact(arguments, operator)
    n = operator.in_size()

    def estimate(key):
        return density_on_interval(
            key,
            operator,
            arguments.k,
            arguments.points,
            ends=arguments.range,
            width=arguments.width,
            num_steps=arguments.steps if arguments.k < n else None,
        )

    curve, seconds = timed(arguments.seed, estimate)
    solution = curve.solution
    report, message = begin_report(arguments, operator, solution, seconds)
    columns = {
        "grid": curve.grid,
        "density": solution.value,
        "std_err": solution.std_err,
        "quadrature_error": solution.quadrature_error,
    }
    if arguments.exact:
        key = jax.random.key(arguments.seed)
        exact = tr.spectral_density(key, operator, n, curve.grid, width=curve.width)
        columns["exact"] = exact.value
    write_columns(arguments.output, **columns)
    report["width"] = curve.width.item()
    report |= {name: np.asarray(column).tolist() for name, column in columns.items()}
    if arguments.plot is not None and not message:
        axes = spectral_density(curve.grid, solution, exact=columns.get("exact"))
        axes.set(
            title=Path(arguments.file).name,
            ylabel=f"density (Gaussians of width {report['width']:.3g})",
        )
        write_plot(arguments.plot, axes)
    return report, message


def _rows(report: Report) -> tuple[Rows, Rows]:
    grid = report["grid"]
    results = [
        ("width", f"{report['width']:.4g} (standard deviation of the Gaussian)"),
        ("grid", f"{len(grid)} points from {number(grid[0])} to {number(grid[-1])}"),
    ]
    names = [
        "grid",
        "density",
        "std_err",
        "quadrature_error",
        *(["exact"] if "exact" in report else []),
    ]
    shown = np.unique(np.linspace(0, len(grid) - 1, min(_MOST_ROWS, len(grid))).round().astype(int))
    columns = [
        [name.replace("_", " "), *(f"{report[name][i]:.4g}" for i in shown)] for name in names
    ]
    left_out = len(grid) - len(shown)
    note = [("", f"({left_out} more points: --json, --output, --plot)")] if left_out else []
    return results, [("", ""), *aligned(columns), *note]


DENSITY = Command(
    "density",
    "the density of the eigenvalues of a symmetric matrix",
    _add_arguments,
    _run,
    _rows,
)
