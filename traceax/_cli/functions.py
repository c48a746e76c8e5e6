"""What the commands for functions of a matrix share: an estimate of one number with two errors."""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tr

from .common import Report, Rows, number, ratio, read_operator, solve

FUNCTIONS = {
    # Near a pole inside of the spectrum, Ritz values can give 1/x any value. It is NaN for x <= 0,
    # so that such a matrix is reported.
    "inv": lambda x: jnp.where(x > 0, jnp.reciprocal(x), jnp.nan),
    "sqrt": jnp.sqrt,
    "exp": jnp.exp,
    "log": jnp.log,
    "log1p": jnp.log1p,
}


def read_hermitian(arguments: argparse.Namespace) -> lx.AbstractLinearOperator:
    """A Hermitian matrix, of which functions can be taken. (Complex ones must be semidefinite:
    lineax has no tag for the others.)
    """
    operator = read_operator(arguments, hermitian=True)
    if arguments.tag is None and jnp.issubdtype(operator.in_structure().dtype, complex):
        raise ValueError(
            f"{arguments.file}: of the complex Hermitian matrices only semidefinite ones can be "
            "used; say that this one is with --tag psd (or --tag nsd)."
        )
    return operator


def solve_function(
    arguments: argparse.Namespace,
    operator: lx.AbstractLinearOperator,
    estimate: Callable[..., tr.Solution],
    **choices: Any,
) -> tuple[Report, str]:
    """Compute an estimate that has a standard error and a quadrature error.

    **Arguments:**

    - `arguments`, `operator`, `estimate`, `**choices`: as for `common.solve`. The estimate must be
        exact for a budget of as many matvecs as the matrix has rows.

    **Returns:**

    The report, and a message if the result cannot be trusted.
    """
    solution, report, message = solve(arguments, operator, estimate, **choices)
    value, std_err = solution.value.item(), solution.std_err.item()
    quadrature_error = solution.quadrature_error.item()
    half = 2 * std_err + quadrature_error
    report["estimate"] = value
    report["std_err"] = std_err
    report["quadrature_error"] = quadrature_error
    report["interval"] = [value - half, value + half]
    if arguments.exact:
        exact = estimate(jax.random.key(0), k=operator.in_size())
        report["exact"] = exact.value.item()
        report["error_in_half_intervals"] = ratio(abs(value - report["exact"]), half)
        # The exact value shows what k products may miss, such as a few negative eigenvalues.
        message = tr.RESULTS[exact.result] or message
    return report, message


def function_rows(choices: Rows, report: Report) -> tuple[Rows, Rows]:
    """The rows of the table for the estimate of `solve_function`, after the rows `choices`."""
    low, high = map(number, report["interval"])
    cause = "too few Lanczos steps" if report["std_err"] else "rounding"
    results = [
        *choices,
        ("estimate", number(report["estimate"])),
        ("standard error", f"{report['std_err']:.3g} (of the random probes)"),
        ("quadrature error", f"{report['quadrature_error']:.3g} (of {cause})"),
        ("interval", f"[{low}, {high}] (two standard errors, and the quadrature error)"),
    ]
    if "exact" not in report:
        return results, []
    within = f"{report['error_in_half_intervals']:.2f} of half the interval"
    return results, [("exact value", f"{report['exact']:.13g}"), ("error", within)]
