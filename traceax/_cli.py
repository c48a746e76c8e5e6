"""The command line: arguments in, a table or JSON out; the numerics are those of the package."""

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_ESTIMATORS = {  # the classes by their names: importing the package takes time
    "trace": {
        "auto": "AutoTraceEstimator",
        "hutchinson": "HutchinsonEstimator",
        "hutch++": "HutchPlusPlusEstimator",
        "xtrace": "XTraceEstimator",
        "xnystrace": "XNysTraceEstimator",
        "exact": "ExactTraceEstimator",
    },
    "diagonal": {
        "auto": "AutoDiagonalEstimator",
        "hutchinson": "HutchinsonDiagonalEstimator",
        "diag++": "DiagPlusPlusEstimator",
        "xdiag": "XDiagEstimator",
        "xnysdiag": "XNysDiagEstimator",
        "exact": "ExactDiagonalEstimator",
    },
}
_NEEDS_NO_TAG = {"xnystrace": "xtrace", "xnysdiag": "xdiag"}  # what to use instead
_DTYPES = ("float32", "float64", "complex64", "complex128")
_OUTPUTS = (".npy", ".txt", ".csv")
_Rows = list[tuple[str, str]]  # of a table: label and text


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return number


def _seed(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 2^32 - 1, got {text!r}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="traceax",
        description="Stochastic estimation of traces and diagonals of matrices in files.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_command(commands, "trace", _trace, _trace_rows)
    diagonal = _add_command(commands, "diagonal", _diagonal, _diagonal_rows)
    diagonal.add_argument(
        "--top",
        type=_positive,
        default=5,
        metavar="N",
        help="also print the N entries that are largest in magnitude; indices count from 0 "
        "(default 5)",
    )
    diagonal.add_argument(
        "--output",
        type=Path,
        metavar="OUT",
        help="write all estimates and standard errors: OUT.npy holds an array of shape (2, n), "
        "OUT.txt and OUT.csv a column of each (complex estimates: real and imaginary parts)",
    )
    return parser


def _add_command(commands: Any, name: str, run: Any, rows: Any) -> argparse.ArgumentParser:
    """A command with the arguments that all have; `run` makes its report, `rows` its table."""
    command = commands.add_parser(
        name,
        help=f"estimate the {name} of a matrix",
        description=f"Estimate the {name} of a square matrix from products with random vectors.",
    )
    command.set_defaults(run=run, rows=rows)
    command.add_argument(
        "file", metavar="FILE", help="Matrix Market .mtx or .mtx.gz, SciPy .npz, NumPy .npy"
    )
    command.add_argument("-k", type=_positive, default=100, help="matvecs to spend (default 100)")
    command.add_argument("--estimator", choices=tuple(_ESTIMATORS[name]), default="auto")
    command.add_argument(
        "--tag", choices=("psd", "nsd"), help="the matrix is positive / negative semidefinite"
    )
    command.add_argument("--seed", type=_seed, default=0, help="seed of the random key (default 0)")
    command.add_argument(
        "--dtype", choices=_DTYPES, help="precision to compute in (default: the file's)"
    )
    command.add_argument("--exact", action="store_true", help=f"also compare with the exact {name}")
    command.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    **Arguments:**

    - `argv`: the arguments, by default those of the process.

    **Returns:**

    The exit code: 0; 1 if the result cannot be trusted; 2 for bad input (with one line on
    standard error).
    """
    arguments = _parser().parse_args(argv)
    import jax  # after the arguments: `--help` should not wait for it

    from ._io import MatrixFileError

    jax.config.update("jax_enable_x64", True)
    try:
        report, message = arguments.run(arguments)
    except (MatrixFileError, ValueError) as error:  # an estimator may not fit the matrix
        print(f"traceax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(_finite(report)) if arguments.json else _table(report, arguments.rows))
    if message:
        print(f"traceax: {message}", file=sys.stderr)
        return 1
    return 0


def _solve(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, Any], str]:
    """The operator, the solution, the part of the report that all commands have, a message."""
    import jax
    import lineax as lx

    import traceax as tr

    from ._io import read_matrix

    operator = read_matrix(arguments.file, arguments.dtype)
    if arguments.estimator in _NEEDS_NO_TAG and arguments.tag is None:
        raise ValueError(
            f"{arguments.file}: {arguments.estimator} needs a semidefinite matrix; say that it is "
            f"with --tag psd (or --tag nsd), or use --estimator "
            f"{_NEEDS_NO_TAG[arguments.estimator]}."
        )
    if arguments.tag is not None:
        tags = {"psd": lx.positive_semidefinite_tag, "nsd": lx.negative_semidefinite_tag}
        operator = lx.TaggedLinearOperator(operator, tags[arguments.tag])
    estimate = getattr(tr, arguments.command)
    estimator = getattr(tr, _ESTIMATORS[arguments.command][arguments.estimator])()

    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        key = jax.random.key(arguments.seed)
        solution = jax.block_until_ready(estimate(key, operator, arguments.k, estimator))
    seconds = time.perf_counter() - start
    for note in notes:
        print(f"traceax: {note.message}", file=sys.stderr)

    report = {
        "file": arguments.file,
        "n": operator.in_size(),
        "dtype": str(operator.in_structure().dtype),
        "estimator": arguments.estimator,
        "k": arguments.k,
        "seed": arguments.seed,
        "matvecs": solution.num_matvecs.item(),
        "seconds": seconds,
    }
    successful = bool(solution.result == tr.RESULTS.successful)
    return operator, solution, report, "" if successful else tr.RESULTS[solution.result]


def _ratio(error: float, size: float) -> float:
    return 0.0 if error == 0 else error / size if size else math.inf


def _trace(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    import lineax as lx
    from scipy.special import stdtrit

    operator, solution, report, message = _solve(arguments)
    value, std_err = solution.value.item(), solution.std_err.item()
    # Student's t: the standard error is itself estimated, from few samples. (No probes: exact.)
    dof = solution.stats["dof"].item()
    half = 0.0 if std_err == 0 else std_err * float(stdtrit(max(dof, 1), 0.975))
    report["estimate"] = value
    report["std_err"] = std_err
    report["interval"] = None if isinstance(value, complex) else [value - half, value + half]
    if arguments.exact:
        report["exact"] = lx.diagonal(operator).sum().item()
        report["error_in_std_errs"] = _ratio(abs(value - report["exact"]), std_err)
    return report, message


def _diagonal(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    import jax.numpy as jnp
    import lineax as lx
    import numpy as np

    from ._estimate import safe_norm

    _check_output(arguments.output)
    operator, solution, report, message = _solve(arguments)
    # Sums over many entries: in double precision, whatever the estimates are in.
    values = solution.value.astype(np.promote_types(solution.value.dtype, np.float64))
    std_errs = solution.std_err.astype(np.float64)
    _write(arguments.output, values, std_errs)

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
        report["relative_error"] = _ratio(safe_norm(errors).item(), safe_norm(exact_sizes).item())
        report["within_two_std_errs"] = (errors <= 2 * std_errs).mean().item()
    return report, message


def _check_output(path: Path | None) -> None:
    """Say what can be said before computing."""
    if path is None:
        return
    if path.suffix.lower() not in _OUTPUTS:
        raise ValueError(
            f"{path}: unknown kind of output '{path.suffix}'; use one of {', '.join(_OUTPUTS)}."
        )
    if path.is_dir():
        raise ValueError(f"{path}: is a directory; give the path of a file in it.")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no directory '{path.parent}'; create it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path}: cannot be written (no permission); choose another path.")


def _write(path: Path | None, values: Any, std_errs: Any) -> None:
    import numpy as np

    if path is None:
        return
    values, std_errs = np.asarray(values), np.asarray(std_errs)
    try:
        with path.open("wb") as file:
            if path.suffix.lower() == ".npy":
                np.save(file, np.stack([values, std_errs]))
                return
            columns = {"estimate": values, "std_err": std_errs}
            if np.iscomplexobj(values):
                columns = {"real": values.real, "imag": values.imag, "std_err": std_errs}
            is_csv = path.suffix.lower() == ".csv"  # its header is no comment
            comma = "," if is_csv else " "
            np.savetxt(
                file,
                np.stack(list(columns.values()), axis=1),
                fmt="%.17g",
                delimiter=comma,
                header=comma.join(columns),
                comments="" if is_csv else "# ",
            )
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error}); choose another path.") from error


def _finite(value: Any) -> Any:
    """What JSON can hold: NaN and infinities become null, complex numbers [re, im]."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, complex):
        return [_finite(value.real), _finite(value.imag)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | complex) -> str:
    return f"{value:.10g}"


def _table(report: dict[str, Any], rows_of: Callable[[dict[str, Any]], tuple[_Rows, _Rows]]) -> str:
    results, comparison = rows_of(report)
    rows = [
        ("matrix", f"{report['file']} ({report['n']} x {report['n']}, {report['dtype']})"),
        ("estimator", report["estimator"]),
        *results,
        ("matvecs", str(report["matvecs"])),
        ("seconds", f"{report['seconds']:.2f} (compilation included)"),
        *comparison,
    ]
    return "\n".join(f"{name:<15} {value}".rstrip() for name, value in rows)


def _trace_rows(report: dict[str, Any]) -> tuple[_Rows, _Rows]:
    results = [
        ("estimate", _number(report["estimate"])),
        ("standard error", f"{report['std_err']:.3g}"),
    ]
    if report["interval"] is not None:
        low, high = map(_number, report["interval"])
        results.append(("95 % interval", f"[{low}, {high}]"))
    if "exact" not in report:
        return results, []
    return results, [
        ("exact trace", f"{report['exact']:.13g}"),
        ("error", f"{report['error_in_std_errs']:.2f} standard errors"),
    ]


def _diagonal_rows(report: dict[str, Any]) -> tuple[_Rows, _Rows]:
    def extreme(entry: dict[str, Any]) -> str:
        by = " (by magnitude)" if isinstance(entry["estimate"], complex) else ""
        return f"{_number(entry['estimate'])} at index {entry['index']}{by}"

    results = [
        ("entries", str(report["n"])),
        ("sum", _number(report["sum"])),
        ("smallest entry", extreme(report["smallest"])),
        ("largest entry", extreme(report["largest"])),
        ("standard error", f"{report['rms_std_err']:.3g} (root mean square)"),
    ]
    rows = []
    if "relative_error" in report:
        within = 100 * report["within_two_std_errs"]
        rows.append(("relative error", f"{report['relative_error']:.3g} (in the l2 norm)"))
        rows.append(("within 2 errors", f"{within:.1f} % of the entries (two standard errors)"))
    estimates = ["estimate", *(_number(entry["estimate"]) for entry in report["top"])]
    errors = ["standard error", *(f"{entry['std_err']:.3g}" for entry in report["top"])]
    names = ["index (from 0)", *(str(entry["index"]) for entry in report["top"])]
    width = max(map(len, estimates))
    rows.append(("", ""))
    for name, estimate, error in zip(names, estimates, errors, strict=True):
        rows.append((name, f"{estimate:<{width}}  {error}"))
    return results, rows
