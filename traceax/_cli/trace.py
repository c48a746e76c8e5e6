"""`traceax trace`: the trace of a matrix, read from its file, or the trace of a function of it,
estimated.
"""

import argparse

import lineax as lx

import traceax as tr

from .common import Command, Report, Rows, add_steps, add_tag, read_operator, reads, solve
from .functions import FUNCTIONS, function_rows, read_hermitian, solve_function


def _add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--function",
        choices=tuple(FUNCTIONS),
        help="estimate the trace of this function of a symmetric matrix, from its products (inv "
        "and log need a positive definite one); without --function the trace of the matrix itself "
        "is read from the file, exactly, and the options of an estimate are refused",
    )
    add_tag(command)
    add_steps(command)


def _run(arguments: argparse.Namespace) -> tuple[Report, str]:
    name = arguments.function
    if reads(arguments):
        operator = read_operator(arguments)
        solution, report, message = solve(
            arguments, operator, lambda key, k: tr.trace(key, operator, operator.in_size())
        )
        return report | {"exact": solution.value.item()}, message
    operator = read_hermitian(arguments)

    def estimate(key, k):
        # Only a positive definite matrix has an `inverse_trace`, which says so if it is not. Steps
        # are those of a quadrature alone.
        if name == "inv" and arguments.steps is None and arguments.tag != "nsd":
            definite = lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)
            return tr.inverse_trace(key, definite, k)
        steps = arguments.steps if k < operator.in_size() else None
        return tr.spectral_sum(key, FUNCTIONS[name], operator, k, num_steps=steps)

    return solve_function(arguments, operator, estimate, function=name)


def _rows(report: Report) -> tuple[Rows, Rows]:
    if "function" not in report:
        return [("exact trace", f"{report['exact']:.13g}")], []
    return function_rows([("function", report["function"])], report)


TRACE = Command(
    "trace",
    "the exact trace of a matrix, or an estimate of that of a function of it",
    _add_arguments,
    _run,
    _rows,
)
