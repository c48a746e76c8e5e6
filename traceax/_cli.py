"""The command line: arguments in, a table or JSON out; the numerics are those of the package."""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

_ESTIMATORS = ("auto", "hutchinson", "hutch++", "xtrace", "xnystrace", "exact")
_DTYPES = ("float32", "float64", "complex64", "complex128")


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
        prog="traceax", description="Stochastic trace estimation of matrices in files."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    trace = commands.add_parser(
        "trace",
        help="estimate the trace of a matrix",
        description="Estimate the trace of a square matrix from products with random vectors.",
    )
    trace.add_argument(
        "file", metavar="FILE", help="Matrix Market .mtx or .mtx.gz, SciPy .npz, NumPy .npy"
    )
    trace.add_argument("-k", type=_positive, default=100, help="matvecs to spend (default 100)")
    trace.add_argument("--estimator", choices=_ESTIMATORS, default="auto")
    trace.add_argument(
        "--tag", choices=("psd", "nsd"), help="the matrix is positive / negative semidefinite"
    )
    trace.add_argument("--seed", type=_seed, default=0, help="seed of the random key (default 0)")
    trace.add_argument(
        "--dtype", choices=_DTYPES, help="precision to compute in (default: the file's)"
    )
    trace.add_argument(
        "--exact", action="store_true", help="also print the exact trace, and the error"
    )
    trace.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    return parser


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
        report, message = _trace(arguments)
    except (MatrixFileError, ValueError) as error:  # an estimator may not fit the matrix
        print(f"traceax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(_finite(report)) if arguments.json else _table(report))
    if message:
        print(f"traceax: {message}", file=sys.stderr)
        return 1
    return 0


def _estimator(name: str) -> Any:
    import traceax as tr

    return {
        "auto": tr.AutoTraceEstimator,
        "hutchinson": tr.HutchinsonEstimator,
        "hutch++": tr.HutchPlusPlusEstimator,
        "xtrace": tr.XTraceEstimator,
        "xnystrace": tr.XNysTraceEstimator,
        "exact": tr.ExactTraceEstimator,
    }[name]()


def _trace(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    import jax
    import lineax as lx
    from scipy.special import stdtrit

    import traceax as tr

    from ._io import read_matrix

    operator = read_matrix(arguments.file, arguments.dtype)
    if arguments.estimator == "xnystrace" and arguments.tag is None:
        raise ValueError(
            f"{arguments.file}: xnystrace needs a semidefinite matrix; say that it is with "
            "--tag psd (or --tag nsd), or use --estimator xtrace."
        )
    if arguments.tag is not None:
        tags = {"psd": lx.positive_semidefinite_tag, "nsd": lx.negative_semidefinite_tag}
        operator = lx.TaggedLinearOperator(operator, tags[arguments.tag])
    estimator = _estimator(arguments.estimator)

    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        key = jax.random.key(arguments.seed)
        solution = tr.trace(key, operator, arguments.k, estimator)
        value, std_err = solution.value.item(), solution.std_err.item()
    seconds = time.perf_counter() - start
    for note in notes:
        print(f"traceax: {note.message}", file=sys.stderr)

    # Student's t: the standard error is itself estimated, from few samples. (No probes: exact.)
    dof = solution.stats["dof"].item()
    half = 0.0 if std_err == 0 else std_err * float(stdtrit(max(dof, 1), 0.975))
    report = {
        "file": arguments.file,
        "n": operator.in_size(),
        "dtype": str(operator.in_structure().dtype),
        "estimator": arguments.estimator,
        "k": arguments.k,
        "seed": arguments.seed,
        "estimate": value,
        "std_err": std_err,
        "interval": None if isinstance(value, complex) else [value - half, value + half],
        "matvecs": solution.num_matvecs.item(),
        "seconds": seconds,
    }
    if arguments.exact:
        exact = lx.diagonal(operator).sum().item()
        error = abs(value - exact)
        report["exact"] = exact
        report["error_in_std_errs"] = (
            0.0 if error == 0 else error / std_err if std_err else math.inf
        )
    successful = bool(solution.result == tr.RESULTS.successful)
    return report, "" if successful else tr.RESULTS[solution.result]


def _finite(value: Any) -> Any:
    """What JSON can hold: NaN and infinities become null, complex numbers [re, im]."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, complex):
        return [_finite(value.real), _finite(value.imag)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(report: dict[str, Any]) -> str:
    def number(value: Any) -> str:
        return f"{value:.10g}"

    rows = [
        ("matrix", f"{report['file']} ({report['n']} x {report['n']}, {report['dtype']})"),
        ("estimator", report["estimator"]),
        ("estimate", number(report["estimate"])),
        ("standard error", f"{report['std_err']:.3g}"),
    ]
    if report["interval"] is not None:
        low, high = map(number, report["interval"])
        rows.append(("95 % interval", f"[{low}, {high}]"))
    rows.append(("matvecs", str(report["matvecs"])))
    rows.append(("seconds", f"{report['seconds']:.2f} (compilation included)"))
    if "exact" in report:
        rows.append(("exact trace", f"{report['exact']:.13g}"))
        rows.append(("error", f"{report['error_in_std_errs']:.2f} standard errors"))
    return "\n".join(f"{name:<15} {value}" for name, value in rows)
