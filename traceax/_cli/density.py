"""`traceax density`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, PRNGKeyArray, Real

import traceax as tr

from .._estimators.solution import Solution
from .._functions.funm import check_hermitian, plan
from .._linalg.lanczos import lanczos, quadrature
from .._operators.block_operator import BlockOperator
from .._probes.random import split
from .._probes.samplers import SphereSampler
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


class DensityCurve(NamedTuple):
    """A spectral density with its grid and the width of the Gaussian."""

    grid: Real[Array, " m"]
    width: Real[Array, ""]
    solution: Solution


def density_on_interval(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int,
    num_points: int,
    *,
    ends: Sequence[float] | None = None,
    width: float | None = None,
    num_steps: int | None = None,
) -> DensityCurve:
    """The spectral density on an equidistant grid, by default one that spans the spectrum.

    The ends of the spectrum are taken to be the extreme Ritz values of a first probe, after k/4
    steps, at most 30. The grid extends beyond them by three standard deviations.

    Cost: `k` matvecs (at least two); with `k >= n`, n matvecs and those of the first probe.

    **Arguments:**

    - `key`, `operator`, `k`, `num_steps`: as for `spectral_density`.
    - `num_points`: the number of points, at least 2.
    - `ends`: the first and the last point.
    - `width`: the standard deviation of the Gaussian, by default the smallest that the steps
        resolve.

    **Returns:**

    A `DensityCurve`; the products of the first probe count in its solution.
    """
    check_hermitian(operator, "A spectral density")
    n, dtype = operator.in_size(), jnp.finfo(BlockOperator(operator).dtype).dtype
    key, first_key = split(key)
    first = 0 if ends is not None else min(n, max(1, min(30, k // 4)))
    left = k if k >= n else max(1, k - first)

    def width_of(extent):
        if width is not None:
            return jnp.asarray(width, dtype)
        return extent / plan(min(left, n), num_steps)[1]

    if ends is not None:
        low, high = (jnp.asarray(end, dtype) for end in ends)
        sigma = width_of(high - low)
    else:
        block = BlockOperator(operator).linearised()
        probe = SphereSampler().probes(first_key, n, 1, block.dtype)
        nodes = quadrature(lanczos(block.mm, probe, first, block.eps))[0]
        low, high = jnp.min(nodes), jnp.max(nodes)
        # The extent of equal eigenvalues is 0: at least a hundredth of their size is taken.
        size = jnp.maximum(jnp.abs(low), jnp.abs(high))
        extent = jnp.maximum(high - low, jnp.where(size > 0, size, 1) / 100)
        sigma = width_of(extent)
        low, high = low - 3 * sigma, high + 3 * sigma
    grid = jnp.linspace(low, high, num_points)
    solution = tr.spectral_density(key, operator, left, grid, width=sigma, num_steps=num_steps)
    spent = solution.num_matvecs + first
    return DensityCurve(grid, sigma, eqx.tree_at(lambda s: s.num_matvecs, solution, spent))


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
