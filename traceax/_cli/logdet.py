"""`traceax logdet`."""

import argparse
from pathlib import Path

import jax
import lineax as lx
import numpy as np

import traceax as tr

from .. import plot
from .common import (
    Command,
    Report,
    Rows,
    add_output,
    add_plot,
    aligned,
    check_output,
    check_plot,
    number,
    read_operator,
    real,
    solve,
    write_columns,
    write_plot,
)
from .functions import function_rows, read_hermitian, solve_function

_PRECONDITIONERS = {
    "auto": lambda: "auto",
    "nystrom": tr.NystromPreconditioner,
    "none": lambda: None,
}


def _add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--shift", type=real, default=0.0, metavar="S", help="of A + S I instead (default 0)"
    )
    command.add_argument(
        "--shifts",
        type=_several,
        metavar="S,S,...",
        help="of A + S I for each of these numbers, all from the same products (where the first is "
        "negative, with an equals sign: --shifts=-0.1,1)",
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
    add_output(command, "with --shifts: shifts, estimates, standard and quadrature errors")
    add_plot(command)


def _several(text: str) -> list[float]:
    return [real(each) for each in text.split(",")]


def _run(arguments: argparse.Namespace) -> tuple[Report, str]:
    if arguments.shifts is not None:
        return _run_shifts(arguments)
    for option in ("plot", "output"):
        if getattr(arguments, option) is not None:
            raise ValueError(
                f"--{option} {getattr(arguments, option)} is for a curve over several shifts: add "
                "--shifts 0.01,0.1,1, or leave it out."
            )
    operator = read_operator(arguments, hermitian=True)
    if arguments.shift:
        identity = lx.IdentityLinearOperator(operator.in_structure())
        operator = operator + arguments.shift * identity
    # The matrix has to be positive definite. The result says if it is not.
    operator = lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)
    preconditioner = _PRECONDITIONERS[arguments.preconditioner]()

    def estimate(key, **spent):
        return tr.logdet(key, operator, preconditioner=preconditioner, **spent)

    choices = {"shift": arguments.shift, "preconditioner": arguments.preconditioner}
    return solve_function(arguments, operator, estimate, **choices)


def _run_shifts(arguments: argparse.Namespace) -> tuple[Report, str]:
    """A log-determinant for each of several shifts, from the same products."""
    if arguments.shift:
        raise ValueError(
            f"--shift {arguments.shift:g} and --shifts exclude each other: add {arguments.shift:g} "
            "to every number of --shifts."
        )
    check_output(arguments.output)
    check_plot(arguments.plot)
    operator, shifts = read_hermitian(arguments), np.asarray(arguments.shifts)
    preconditioner = _PRECONDITIONERS[arguments.preconditioner]()

    def estimate(key, **spent):
        return tr.logdet(key, operator, shifts=shifts, preconditioner=preconditioner, **spent)

    solution, report, message = solve(arguments, operator, estimate)
    columns = {
        "shift": shifts,
        "estimate": solution.value,
        "std_err": solution.std_err,
        "quadrature_error": solution.quadrature_error,
    }
    if arguments.exact:
        exact = estimate(jax.random.key(0), k=operator.in_size())
        columns["exact"] = exact.value
        message = tr.RESULTS[exact.result] or message
    write_columns(arguments.output, **columns)
    report |= {name: np.asarray(column).tolist() for name, column in columns.items()}
    if arguments.plot is not None and not message:
        axes = plot.shifts(shifts, solution, exact=columns.get("exact"))
        axes.set(title=Path(arguments.file).name, ylabel="log det(A + shift I)")
        write_plot(arguments.plot, axes)
    return report, message


def _rows(report: Report) -> tuple[Rows, Rows]:
    if isinstance(report["shift"], list):
        names = ["shift", "estimate", "std_err", "quadrature_error"]
        names += ["exact"] if "exact" in report else []
        texts = {"std_err": "{:.3g}".format, "quadrature_error": "{:.3g}".format}
        labels = {"std_err": "standard error", "quadrature_error": "quadrature error"}
        columns = [
            [labels.get(name, name), *map(texts.get(name, number), report[name])] for name in names
        ]
        return [("", ""), *aligned(columns), ("", "")], []
    shift = [("shift", number(report["shift"]))] if report["shift"] else []
    return function_rows([*shift, ("preconditioner", report["preconditioner"])], report)


LOGDET = Command(
    "logdet",
    "an estimate of the log-determinant of a positive definite matrix, from its products",
    _add_arguments,
    _run,
    _rows,
)
