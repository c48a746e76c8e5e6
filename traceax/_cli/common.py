"""What the commands share: arguments, the estimate, the report, the table, files of columns."""

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import lineax as lx
import numpy as np

import traceax as tr

from .._estimators.solution import outcome_of
from .._logdet.fallback import MOST_ROWS
from ..plot import PICTURES, require_matplotlib
from .files import read_matrix

Report = dict[str, Any]
Rows = list[tuple[str, str]]  # the rows of a table, each a label and a text

_DTYPES = ("float32", "float64", "complex64", "complex128")
_TAGS = {"psd": lx.positive_semidefinite_tag, "nsd": lx.negative_semidefinite_tag}
_COLUMN_FILES = (".npy", ".txt", ".csv")
_TOLERANCES = ("rtol", "atol", "max_k")
_ESTIMATING = ("k", "seed", *_TOLERANCES, "tag", "steps")  # options that only an estimate has


class Command(NamedTuple):
    """A command of the command line."""

    name: str
    what: str  # what the command prints, in words
    add_arguments: Callable[[argparse.ArgumentParser], None]  # those that only this command has
    run: Callable[[argparse.Namespace], tuple[Report, str]]  # the report, and a message if it fails
    rows: Callable[[Report], tuple[Rows, Rows]]  # its own, before and after those of all commands


# --- arguments -----------------------------------------------------------------------------------


def _whole(text: str, low: int, high: float, words: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number < high:
        raise argparse.ArgumentTypeError(f"expected {words}, got {text!r}")
    return number


def positive(text: str) -> int:
    """The type of an argument that is a positive whole number."""
    return _whole(text, 1, math.inf, "a positive whole number")


def _seed(text: str) -> int:
    return _whole(text, 0, 2**32, "a number from 0 to 2^32 - 1")


def real(text: str) -> float:
    """The type of an argument that is a finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return number


def add_shared_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that all commands have."""
    command.add_argument(
        "file", metavar="FILE", help="Matrix Market .mtx or .mtx.gz, SciPy .npz, NumPy .npy"
    )
    command.add_argument("-k", type=positive, help="matvecs to spend (default 100)")
    command.add_argument("--seed", type=_seed, help="seed of the random key (default 0)")
    command.add_argument(
        "--dtype", choices=_DTYPES, help="precision to compute in (default: the file's)"
    )
    command.add_argument(
        "--exact", action="store_true", help="also compute the exact value, and compare"
    )
    command.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )


def add_tag(command: argparse.ArgumentParser) -> None:
    """Add `--tag`: what the user knows of the matrix."""
    command.add_argument(
        "--tag", choices=tuple(_TAGS), help="the matrix is positive / negative semidefinite"
    )


def _tolerance(text: str) -> float:
    number = real(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected a number that is not negative, got {text!r}")
    return number


def add_tolerance(command: argparse.ArgumentParser, what: str) -> None:
    """Add the options of a tolerance, which takes the place of a budget."""
    command.add_argument(
        "--rtol", type=_tolerance, metavar="R", help=f"instead of -k: a relative error of {what}"
    )
    command.add_argument(
        "--atol", type=_tolerance, metavar="A", help=f"instead of -k: an absolute error of {what}"
    )
    command.add_argument(
        "--max-k",
        type=positive,
        metavar="K",
        help="the most matvecs that a tolerance may take (default: the size of the matrix, at most "
        "1000)",
    )


def reads(arguments: argparse.Namespace) -> bool:
    """Whether the result is read from the file, as no function of the matrix is asked for."""
    return getattr(arguments, "function", "") is None


def settle(arguments: argparse.Namespace) -> None:
    """Check that the options fit together, and set a budget and a seed where none are given.

    If the result is read from the file, the options of an estimate are refused. An estimate has a
    budget or a tolerance, not both.
    """
    for name in _ESTIMATING if reads(arguments) else ():
        value = getattr(arguments, name, None)
        if value is not None:
            option = "-k" if name == "k" else f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option} {value} is for estimates, and the {arguments.command} of a matrix is "
                f"read from its file, exactly: leave {option} out, or add --function for the "
                f"{arguments.command} of a function of the matrix."
            )
    arguments.seed = arguments.seed or 0
    rtol, atol, max_k = (getattr(arguments, name, None) for name in _TOLERANCES)
    if rtol is None and atol is None:
        if max_k is not None:
            raise ValueError(
                f"--max-k bounds a tolerance, got {max_k} without one: give --rtol or --atol, or "
                f"use -k {max_k}."
            )
        arguments.k = arguments.k or 100
    elif arguments.k is not None:
        raise ValueError(
            f"-k {arguments.k} is a budget, and --rtol and --atol are tolerances: give one or the "
            f"other. For a tolerance that may take {arguments.k} matvecs: --max-k {arguments.k}."
        )


def _tolerances(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in _TOLERANCES if hasattr(arguments, name)}


def _spending(arguments: argparse.Namespace) -> dict[str, Any]:
    """The budget or the tolerance, as arguments of a function of the package."""
    if arguments.k is not None:
        return {"k": arguments.k}
    return _tolerances(arguments)


def add_steps(command: argparse.ArgumentParser) -> None:
    """Add `--steps`, which divides the budget of a quadrature."""
    command.add_argument(
        "--steps", type=positive, metavar="Q", help="Lanczos steps for each probe (default: by k)"
    )


def add_output(command: argparse.ArgumentParser, columns: str) -> None:
    """Add `--output`, a file for everything that does not fit into the table."""
    command.add_argument(
        "--output",
        type=Path,
        metavar="OUT",
        help=f"write {columns}: OUT.npy holds an array with a row of each, OUT.txt and OUT.csv a "
        "column of each (complex estimates: real and imaginary parts)",
    )


def add_plot(command: argparse.ArgumentParser) -> None:
    """Add `--plot`, a picture of a curve."""
    command.add_argument(
        "--plot",
        type=Path,
        metavar="OUT",
        help=f"draw it ({', '.join(PICTURES)}); needs matplotlib",
    )


# --- the estimate --------------------------------------------------------------------------------


def read_operator(
    arguments: argparse.Namespace, *, hermitian: bool = False
) -> lx.AbstractLinearOperator:
    """The matrix in the file, with the tag that the user gives it."""
    operator = read_matrix(arguments.file, arguments.dtype, hermitian=hermitian)
    if arguments.tag is None:
        return operator
    return lx.TaggedLinearOperator(operator, _TAGS[arguments.tag])


def timed(seed: int, estimate: Callable[[Any], Any]) -> tuple[Any, float]:
    """Compute an estimate, with its warnings on standard error.

    **Arguments:**

    - `seed`: the seed of the random key.
    - `estimate`: the estimate, a function of the random key.

    **Returns:**

    What `estimate` returns, and the seconds that it took.
    """
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        outcome = jax.block_until_ready(estimate(jax.random.key(seed)))
    seconds = time.perf_counter() - start
    for note in notes:
        print(f"traceax: {note.message}", file=sys.stderr)
    return outcome, seconds


def begin_report(
    arguments: argparse.Namespace,
    operator: lx.AbstractLinearOperator,
    solution: tr.Solution,
    seconds: float,
    **choices: Any,
) -> tuple[Report, str]:
    """The part of the report that all commands have.

    **Arguments:**

    - `arguments`: the arguments of the command.
    - `operator`: the operator.
    - `solution`: the estimate, or the number that was read.
    - `seconds`: the time that it took.
    - `**choices`: further choices that the report should name.

    **Returns:**

    The report, and a message if the result cannot be trusted.
    """
    asked = () if reads(arguments) else ("k", *_tolerances(arguments), "seed")
    report = {
        "file": arguments.file,
        "n": operator.in_size(),
        "dtype": str(operator.in_structure().dtype),
        **choices,
        **{name: getattr(arguments, name) for name in asked},
        "matvecs": solution.num_matvecs.item(),
        "seconds": seconds,
        "result": outcome_of(solution.result),
    }
    return report, tr.RESULTS[solution.result]  # the message of success is empty


def check_exact(arguments: argparse.Namespace, operator: lx.AbstractLinearOperator) -> None:
    """Refuse an exact value that would take too much memory or time, before any work is done."""
    n = operator.in_size()
    if arguments.exact and n > MOST_ROWS:
        size = 8 * n**2 / 2**30
        raise ValueError(
            f"--exact takes a dense matrix, or a product for each row, got {n} rows ({size:.0f} "
            f"GiB) for at most {MOST_ROWS}. Leave it out, and compare with a larger -k."
        )


def solve(
    arguments: argparse.Namespace,
    operator: lx.AbstractLinearOperator,
    estimate: Callable[..., tr.Solution],
    **choices: Any,
) -> tuple[Any, Report, str]:
    """Compute an estimate, and begin the report.

    **Arguments:**

    - `arguments`: the arguments of the command.
    - `operator`: the matrix in the file.
    - `estimate`: the estimate, a function of the random key and the budget (or the tolerance).
    - `**choices`: further choices that the report should name.

    **Returns:**

    The solution, the report, and a message if the result cannot be trusted.
    """
    check_exact(arguments, operator)
    spent = _spending(arguments)
    solution, seconds = timed(arguments.seed, lambda key: estimate(key, **spent))
    return solution, *begin_report(arguments, operator, solution, seconds, **choices)


def ratio(error: float, size: float) -> float:
    """An error relative to a size; 0 if there is no error."""
    return 0.0 if error == 0 else error / size if size else math.inf


# --- the table -----------------------------------------------------------------------------------


def number(value: float | complex) -> str:
    """A number as the table shows it."""
    return f"{value:.10g}"


def aligned(columns: list[list[str]]) -> Rows:
    """Columns as rows of the table. The first column has the labels."""
    widths = [max(map(len, column)) for column in columns[1:]]
    return [
        (label, "  ".join(f"{text:<{width}}" for text, width in zip(cells, widths, strict=True)))
        for label, *cells in zip(*columns, strict=True)
    ]


def table(report: Report, rows_of: Callable[[Report], tuple[Rows, Rows]]) -> str:
    """The report as a table.

    **Arguments:**

    - `report`: the report.
    - `rows_of`: the `rows` of the command.
    """
    results, comparison = rows_of(report)
    rows = [
        ("matrix", f"{report['file']} ({report['n']} x {report['n']}, {report['dtype']})"),
        *results,
        ("matvecs", str(report["matvecs"])),
        ("seconds", f"{report['seconds']:.2f} (compilation included)"),
        ("result", report["result"]),
        *comparison,
    ]
    return "\n".join(f"{name:<16} {value}".rstrip() for name, value in rows)


# --- files ---------------------------------------------------------------------------------------


def check_output(path: Path | None, suffixes: tuple[str, ...] = _COLUMN_FILES) -> None:
    """Refuse a file that cannot be written, before anything is computed.

    **Arguments:**

    - `path`: the file to write, or None.
    - `suffixes`: the kinds of files that can be written.
    """
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise ValueError(
            f"{path}: unknown kind of output '{path.suffix}'; use one of {', '.join(suffixes)}."
        )
    if path.is_dir():
        raise ValueError(f"{path}: is a directory; give the path of a file in it.")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no directory '{path.parent}'; create it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path}: cannot be written (no permission); choose another path.")


def check_plot(path: Path | None) -> None:
    """Refuse a picture that cannot be drawn or written, before anything is computed."""
    if path is None:
        return
    check_output(path, PICTURES)
    try:
        require_matplotlib()
    except ImportError as error:
        raise ValueError(str(error)) from error


def write(path: Path, save: Callable[[Any], None]) -> None:
    """Write a file.

    **Arguments:**

    - `path`: the file.
    - `save`: a function that writes the contents to an open binary file.
    """
    try:
        with path.open("wb") as file:
            save(file)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error}); choose another path.") from error


def write_plot(path: Path, axes: Any) -> None:
    """Write the picture that these matplotlib axes belong to."""
    kind = path.suffix.lower().removeprefix(".")
    write(path, lambda file: axes.figure.savefig(file, format=kind, dpi=150))


def _save_text(file: Any, columns: dict[str, Any], is_csv: bool) -> None:
    parts = {}
    for name, column in columns.items():
        is_complex = np.iscomplexobj(column)
        parts |= {"real": column.real, "imag": column.imag} if is_complex else {name: column}
    comma = "," if is_csv else " "
    np.savetxt(
        file,
        np.stack(list(parts.values()), axis=1),
        fmt="%.17g",
        delimiter=comma,
        header=comma.join(parts),
        comments="" if is_csv else "# ",  # the header of a .csv is no comment
    )


def write_columns(path: Path | None, **columns: Any) -> None:
    """Write arrays of the same length to a file.

    **Arguments:**

    - `path`: the file, or None to write nothing.
    - `**columns`: the arrays, by their names.
    """
    if path is None:
        return
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    if path.suffix.lower() == ".npy":
        write(path, lambda file: np.save(file, np.stack(list(arrays.values()))))
    else:
        write(path, lambda file: _save_text(file, arrays, path.suffix.lower() == ".csv"))
