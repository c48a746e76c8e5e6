"""`traceax diagonal`."""

import argparse
import math
from typing import Any

import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr

from .._core.estimate import safe_norm
from .common import (
    Command,
    Report,
    Rows,
    add_output,
    add_tolerance,
    aligned,
    check_output,
    number,
    positive,
    ratio,
    write_columns,
)
from .trace import add_estimator, solve_with_estimator

_ESTIMATORS = {
    "auto": tr.AutoDiagonalEstimator,
    "hutchinson": tr.HutchinsonDiagonalEstimator,
    "diag++": tr.DiagPlusPlusEstimator,
    "xdiag": tr.XDiagEstimator,
    "xnysdiag": tr.XNysDiagEstimator,
    "exact": tr.ExactDiagonalEstimator,
}


def _add_arguments(command: argparse.ArgumentParser) -> None:
    add_estimator(command, _ESTIMATORS)
    add_tolerance(command, "the diagonal, in the l2 norm")
    command.add_argument(
        "--top",
        type=positive,
        default=5,
        metavar="N",
        help="also print the N entries that are largest in magnitude; indices count from 0 "
        "(default 5)",
    )
    add_output(command, "all estimates and standard errors")


def _run(arguments: argparse.Namespace) -> tuple[Report, str]:
    check_output(arguments.output)
    operator, solution, report, message = solve_with_estimator(
        arguments, tr.diagonal, _ESTIMATORS, {"xnysdiag": "xdiag"}
    )
    # Sums over many entries: in double precision, whatever the estimates are in.
    values = solution.value.astype(np.promote_types(solution.value.dtype, np.float64))
    std_errs = solution.std_err.astype(np.float64)
    write_columns(arguments.output, estimate=values, std_err=std_errs)

    def entry(index: Any) -> dict[str, Any]:
        return {
            "index": int(index),
            "estimate": values[index].item(),
            "std_err": std_errs[index].item(),
        }

    sizes = jnp.abs(values)
    order = sizes if jnp.iscomplexobj(values) else values
    report["sum"] = values.sum().item()
    report["smallest"] = entry(order.argmin())
    report["largest"] = entry(order.argmax())
    report["rms_std_err"] = safe_norm(std_errs).item() / math.sqrt(values.size)
    report["top"] = [entry(index) for index in jnp.argsort(-sizes)[: arguments.top]]
    if arguments.exact:
        exact = lx.diagonal(operator).astype(values.dtype)
        errors, exact_sizes = jnp.abs(values - exact), jnp.abs(exact)
        report["relative_error"] = ratio(safe_norm(errors).item(), safe_norm(exact_sizes).item())
        report["within_two_std_errs"] = (errors <= 2 * std_errs).mean().item()
    return report, message


def _rows(report: Report) -> tuple[Rows, Rows]:
    def extreme(entry: dict[str, Any]) -> str:
        by = " (by magnitude)" if isinstance(entry["estimate"], complex) else ""
        return f"{number(entry['estimate'])} at index {entry['index']}{by}"

    results = [
        ("estimator", report["estimator"]),
        ("entries", str(report["n"])),
        ("sum", number(report["sum"])),
        ("smallest entry", extreme(report["smallest"])),
        ("largest entry", extreme(report["largest"])),
        ("standard error", f"{report['rms_std_err']:.3g} (root mean square)"),
    ]
    rows = []
    if "relative_error" in report:
        within = 100 * report["within_two_std_errs"]
        rows.append(("relative error", f"{report['relative_error']:.3g} (in the l2 norm)"))
        rows.append(("within 2 errors", f"{within:.1f} % of the entries (two standard errors)"))
    top = report["top"]
    columns = [
        ["index (from 0)", *(str(entry["index"]) for entry in top)],
        ["estimate", *(number(entry["estimate"]) for entry in top)],
        ["standard error", *(f"{entry['std_err']:.3g}" for entry in top)],
    ]
    return results, [*rows, ("", ""), *aligned(columns)]


DIAGONAL = Command("diagonal", "the diagonal of a square matrix", _add_arguments, _run, _rows)
