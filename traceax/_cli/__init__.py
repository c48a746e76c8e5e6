"""The command line: arguments in, a table or JSON out; the numerics are those of the package.

A command is one file, and one entry of `_COMMANDS`.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax

from .common import Command, add_shared_arguments, settle, table
from .density import DENSITY
from .diagonal import DIAGONAL
from .files import MatrixFileError
from .logdet import LOGDET
from .trace import TRACE

_COMMANDS: tuple[Command, ...] = (TRACE, DIAGONAL, LOGDET, DENSITY)
_REMOVED = {"spectral-sum": "trace FILE --function NAME"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="traceax",
        description="Traces, diagonals, log-determinants and spectra of matrices in files, and of "
        "their functions.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('traceax')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        own = commands.add_parser(
            command.name,
            help=command.what,
            description=f"{command.name.capitalize()}: {command.what}.",
        )
        own.set_defaults(run=command.run, rows=command.rows)
        add_shared_arguments(own)
        command.add_arguments(own)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    if argv and argv[0] in _REMOVED:
        raise ValueError(f"There is no {argv[0]} any more: use `traceax {_REMOVED[argv[0]]}`.")
    arguments = _parser().parse_args(argv)
    settle(arguments)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    **Arguments:**

    - `argv`: the arguments, by default those of the process.

    **Returns:**

    The exit code: 0 for success; 1 if the result cannot be trusted; 2 for bad input, with one line
    on standard error.
    """
    jax.config.update("jax_enable_x64", True)
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        report, message = arguments.run(arguments)
    except (MatrixFileError, ValueError) as error:  # the latter if an estimator rejects the matrix
        print(f"traceax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(_finite(report)) if arguments.json else table(report, arguments.rows))
    if message:
        print(f"traceax: {message}", file=sys.stderr)
        return 1
    return 0


def _finite(value: Any) -> Any:
    """The value in a form that JSON has: NaN and infinities as null, complex numbers as lists."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, complex):
        return [_finite(value.real), _finite(value.imag)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
