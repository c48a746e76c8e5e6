"""`traceax trace`, and what it shares with `traceax diagonal`: the choice of an estimator."""

import argparse
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import lineax as lx

import traceax as tr

from .common import (
    Command,
    Report,
    Rows,
    add_tag,
    add_tolerance,
    begin_report,
    number,
    ratio,
    read_operator,
    spending,
    timed,
)

_ESTIMATORS = {
    "auto": tr.AutoTraceEstimator,
    "hutchinson": tr.HutchinsonEstimator,
    "hutch++": tr.HutchPlusPlusEstimator,
    "a-hutch++": tr.AdaptiveHutchPlusPlusEstimator,
    "xtrace": tr.XTraceEstimator,
    "xnystrace": tr.XNysTraceEstimator,
    "exact": tr.ExactTraceEstimator,
}


def add_estimator(command: argparse.ArgumentParser, estimators: dict[str, Any]) -> None:
    """Which estimator, and the tag that some of them need."""
    command.add_argument("--estimator", choices=tuple(estimators), default="auto")
    add_tag(command)


def solve_with_estimator(
    arguments: argparse.Namespace,
    estimate: Callable[..., tr.Solution],
    estimators: dict[str, Any],
    needs_no_tag: dict[str, str],
) -> tuple[lx.AbstractLinearOperator, tr.Solution, Report, str]:
    """Read the matrix, and run the estimator that was chosen.

    **Arguments:**

    - `arguments`: those of the command.
    - `estimate`: `trace` or `diagonal` of the package.
    - `estimators`: the classes, by their names.
    - `needs_no_tag`: for those that need a tag, what to use instead.

    **Returns:**

    The operator, the solution, the report that was begun, a message if it failed.
    """
    name = arguments.estimator
    operator = read_operator(arguments)
    if name in needs_no_tag and arguments.tag is None:
        raise ValueError(
            f"{arguments.file}: {name} needs a semidefinite matrix; say that it is with --tag psd "
            f"(or --tag nsd), or use --estimator {needs_no_tag[name]}."
        )

    def run(key):
        return estimate(key, operator, estimator=estimators[name](), **spending(arguments))

    solution, seconds = timed(arguments.seed, run)
    return operator, solution, *begin_report(arguments, operator, solution, seconds, estimator=name)


def _add_arguments(command: argparse.ArgumentParser) -> None:
    add_estimator(command, _ESTIMATORS)
    add_tolerance(command, "the trace")


def _run(arguments: argparse.Namespace) -> tuple[Report, str]:
    operator, solution, report, message = solve_with_estimator(
        arguments, tr.trace, _ESTIMATORS, {"xnystrace": "xtrace", "a-hutch++": "hutch++"}
    )
    value, std_err = solution.value.item(), solution.std_err.item()
    ends = [end.item() for end in solution.interval()]
    report["estimate"] = value
    report["std_err"] = std_err
    report["interval"] = None if isinstance(value, complex) else ends
    if arguments.exact:
        entries = lx.diagonal(operator)
        report["exact"] = entries.sum().item()
        # An exact estimate may add up the same entries in another order.
        rounding = 8 * jnp.finfo(entries.dtype).eps * jnp.abs(entries).sum().item()
        error = abs(value - report["exact"])
        report["error_in_std_errs"] = ratio(0 if error <= rounding else error, std_err)
    return report, message


def _rows(report: Report) -> tuple[Rows, Rows]:
    results = [
        ("estimator", report["estimator"]),
        ("estimate", number(report["estimate"])),
        ("standard error", f"{report['std_err']:.3g}"),
    ]
    if report["interval"] is not None:
        low, high = map(number, report["interval"])
        results.append(("95 % interval", f"[{low}, {high}]"))
    if "exact" not in report:
        return results, []
    return results, [
        ("exact trace", f"{report['exact']:.13g}"),
        ("error", f"{report['error_in_std_errs']:.2f} standard errors"),
    ]


TRACE = Command("trace", "the trace of a square matrix", _add_arguments, _run, _rows)
