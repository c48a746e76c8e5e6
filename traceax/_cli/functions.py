"""`traceax logdet` and `traceax spectral-sum`: one number, with the errors of its two sources."""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tr

from .common import (
    Command,
    Report,
    Rows,
    add_steps,
    add_tag,
    add_tolerance,
    begin_report,
    number,
    ratio,
    read_operator,
    real,
    spending,
    timed,
)

_FUNCTIONS = {
    "inv": jnp.reciprocal,
    "sqrt": jnp.sqrt,
    "exp": jnp.exp,
    "log": jnp.log,
    "log1p": jnp.log1p,
}
_PRECONDITIONERS = {
    "auto": lambda: "auto",
    "nystrom": tr.NystromPreconditioner,
    "none": lambda: None,
}


def read_hermitian(arguments: argparse.Namespace) -> lx.AbstractLinearOperator:
    """A matrix that functions can be taken of. Lineax has no tag for indefinite complex ones."""
    operator = read_operator(arguments, hermitian=True)
    if arguments.tag is None and jnp.issubdtype(operator.in_structure().dtype, complex):
        raise ValueError(
            f"{arguments.file}: of the complex Hermitian matrices only semidefinite ones can be "
            "used; say that this one is with --tag psd (or --tag nsd)."
        )
    return operator


def _solve(
    arguments: argparse.Namespace,
    operator: lx.AbstractLinearOperator,
    estimate: Callable[..., tr.Solution],
    **choices: Any,
) -> tuple[Report, str]:
    """The report of an estimate of a key and a budget (or a tolerance)."""
    spent = spending(arguments)
    solution, seconds = timed(arguments.seed, lambda key: estimate(key, **spent))
    report, message = begin_report(arguments, operator, solution, seconds, **choices)
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


def _rows_of(choices: Rows, report: Report) -> tuple[Rows, Rows]:
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


# --- log-determinants ----------------------------------------------------------------------------


def _add_logdet_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--shift", type=real, default=0.0, metavar="S", help="of A + S I instead (default 0)"
    )
    command.add_argument(
        "--preconditioner", choices=tuple(_PRECONDITIONERS), default="auto", help="default: auto"
    )
    command.add_argument(
        "--tag",
        choices=("psd",),
        help="the matrix is positive semidefinite also without the shift, which then bounds the "
        "quadrature error",
    )
    add_tolerance(command, "the log-determinant")


def _run_logdet(arguments: argparse.Namespace) -> tuple[Report, str]:
    operator = read_operator(arguments, hermitian=True)
    if arguments.shift:
        identity = lx.IdentityLinearOperator(operator.in_structure())
        operator = operator + arguments.shift * identity
    # Only positive definite matrices have one: the result says if this is none.
    operator = lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)
    preconditioner = _PRECONDITIONERS[arguments.preconditioner]()

    def estimate(key, **spent):
        return tr.logdet(key, operator, preconditioner=preconditioner, **spent)

    choices = {"shift": arguments.shift, "preconditioner": arguments.preconditioner}
    return _solve(arguments, operator, estimate, **choices)


def _logdet_rows(report: Report) -> tuple[Rows, Rows]:
    shift = [("shift", number(report["shift"]))] if report["shift"] else []
    return _rows_of([*shift, ("preconditioner", report["preconditioner"])], report)


LOGDET = Command(
    "logdet",
    "the log-determinant of a positive definite matrix",
    _add_logdet_arguments,
    _run_logdet,
    _logdet_rows,
)


# --- spectral sums -------------------------------------------------------------------------------


def _add_sum_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--function", choices=tuple(_FUNCTIONS), required=True, help="of the eigenvalues"
    )
    add_tag(command)
    add_steps(command)


def _run_sum(arguments: argparse.Namespace) -> tuple[Report, str]:
    operator, name = read_hermitian(arguments), arguments.function

    def estimate(key, k):
        exact = k >= operator.in_size()
        return tr.spectral_sum(
            key, _FUNCTIONS[name], operator, k, num_steps=None if exact else arguments.steps
        )

    return _solve(arguments, operator, estimate, function=name)


def _sum_rows(report: Report) -> tuple[Rows, Rows]:
    return _rows_of([("function", report["function"])], report)


SPECTRAL_SUM = Command(
    "spectral-sum",
    "the sum of a function of the eigenvalues of a symmetric matrix",
    _add_sum_arguments,
    _run_sum,
    _sum_rows,
)
