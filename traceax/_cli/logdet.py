"""`traceax logdet`."""

import argparse

import lineax as lx

import traceax as tr

from .common import Command, Report, Rows, add_tolerance, number, read_operator, real
from .functions import function_rows, solve_function

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
        "--preconditioner", choices=tuple(_PRECONDITIONERS), default="auto", help="default: auto"
    )
    command.add_argument(
        "--tag",
        choices=("psd",),
        help="the matrix is positive semidefinite also without the shift, which then bounds the "
        "quadrature error",
    )
    add_tolerance(command, "the log-determinant")


def _run(arguments: argparse.Namespace) -> tuple[Report, str]:
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


def _rows(report: Report) -> tuple[Rows, Rows]:
    shift = [("shift", number(report["shift"]))] if report["shift"] else []
    return function_rows([*shift, ("preconditioner", report["preconditioner"])], report)


LOGDET = Command(
    "logdet",
    "an estimate of the log-determinant of a positive definite matrix, from its products",
    _add_arguments,
    _run,
    _rows,
)
