"""What the commands for functions of a matrix share: one number, with the errors of two sources."""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tr

from .common import Report, Rows, number, ratio, read_operator, solve


def read_hermitian(arguments: argparse.Namespace) -> lx.AbstractLinearOperator:
    """A matrix that functions can be taken of. Lineax has no tag for indefinite complex ones."""
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
    """Run an estimate whose error is that of the probes and that of the quadrature.

    **Arguments:**

    - `arguments`, `operator`, `estimate`, `**choices`: as for `common.solve`. With a budget of as
        many matvecs as there are rows the estimate is exact.

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
        # What k products did not show (a few negative eigenvalues, say), all of them do.
        message = tr.RESULTS[exact.result] or message
    return report, message


def function_rows(choices: Rows, report: Report) -> tuple[Rows, Rows]:
    """The rows of the table for such an estimate, after those of its choices."""
    low, high = map(number, report["interval"])
    results = [
        *choices,
        ("estimate", number(report["estimate"])),
        ("standard error", f"{report['std_err']:.3g} (of the random probes)"),
        ("quadrature error", f"{report['quadrature_error']:.3g} (of too few Lanczos steps)"),
        ("interval", f"[{low}, {high}] (two standard errors, and the quadrature error)"),
    ]
    if "exact" not in report:
        return results, []
    within = f"{report['error_in_half_intervals']:.2f} of half the interval"
    return results, [("exact value", f"{report['exact']:.13g}"), ("error", within)]
