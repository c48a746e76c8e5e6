"""The command line: a matrix in a file, one estimate of the matrix. The numerics are the package's.

A command is a function that returns a `_Question`, and one entry of `_COMMANDS`.
"""

import functools
import importlib
import json
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr

from . import plot
from ._core.verdict import outcome_of

_FUNCTIONS = {
    # Quadrature can miss a pole inside of the spectrum: NaN for x <= 0 reports it.
    "inv": lambda x: jnp.where(x > 0, jnp.reciprocal(x), jnp.nan),
    "sqrt": jnp.sqrt,
    "exp": jnp.exp,
    "log": jnp.log,
    "log1p": jnp.log1p,
}
_PRECONDITIONERS = {
    "auto": "auto",
    "kernel": tr.KernelPreconditioner(),
    "nystrom": tr.NystromPreconditioner(),
    "none": None,
}
_ROWS_OF_A_CURVE = 25  # the most rows of a curve that are printed


class _Question(NamedTuple):
    """What a command asks of the matrix."""

    estimate: Callable[..., tr.Solution]  # a function of the budget `k`, or of the tolerance `rtol`
    axis: dict[str, Any]  # what the entries of a vector belong to, by its name; empty for a number
    draw: Any = None  # for a curve: the function of axis, solution and exact values that draws it
    products: int = 0  # those that were made to ask


# --- files ---------------------------------------------------------------------------------------


def _load(path: str) -> Any:
    """The matrix in a file, a SciPy sparse array or a NumPy array. The suffix decides."""
    from scipy.io import mmread  # here, so that the package imports fast without SciPy
    from scipy.sparse import csr_array, issparse, load_npz

    readers = {".npy": np.load, ".npz": load_npz}
    read = readers.get(Path(path).suffix.lower(), mmread)
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of `mmread`
            matrix = read(path)
    except Exception as error:  # parsers raise exceptions of many kinds
        raise ValueError(
            f"{path}: cannot be read ({type(error).__name__}: {error}). Give a Matrix Market file "
            "(.mtx, .mtx.gz), a SciPy sparse matrix (.npz) or a NumPy array (.npy)."
        ) from error
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{path}: holds an array of shape {matrix.shape}. Give a square matrix.")
    return csr_array(matrix) if issparse(matrix) else matrix


def read_operator(
    path: str, dtype: str | None = None, *, is_psd: bool = False, needs_symmetry: bool = False
) -> lx.AbstractLinearOperator:
    """The square matrix in a file: a sparse operator, or a `lineax.MatrixLinearOperator`, tagged
    symmetric if it is real and equals its transpose. Integers become float64. If `needs_symmetry`,
    a matrix that is neither symmetric nor complex and semidefinite is refused.
    """
    matrix = _load(path)
    target = np.dtype(dtype or (matrix.dtype if matrix.dtype.kind in "fc" else float))
    is_real = matrix.dtype.kind != "c"
    if not is_real and target.kind != "c":
        raise ValueError(f"{path}: the entries are complex. Use --dtype complex64 or complex128.")
    matrix = matrix.astype(target)
    is_hermitian = (abs(matrix - matrix.conj().T) > 0).sum() == 0  # NaN is for the estimators
    if (needs_symmetry or is_psd) and not is_hermitian:
        raise ValueError(
            f"{path}: the matrix is not symmetric (Hermitian), as it must be. Give (A + A^H) / 2."
        )
    if needs_symmetry and not (is_real or is_psd):
        raise ValueError(
            f"{path}: of the complex matrices only positive semidefinite ones have functions here. "
            "Say that this one is with --psd."
        )
    tags = (lx.symmetric_tag,) if is_real and is_hermitian else ()
    tags = (lx.positive_semidefinite_tag,) if is_psd else tags
    if isinstance(matrix, np.ndarray):
        return lx.MatrixLinearOperator(jnp.asarray(matrix), tags)
    return tr.SparseLinearOperator(matrix, tags)


# --- the commands --------------------------------------------------------------------------------


def _definite(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The operator, tagged positive definite: the result says so if it is not."""
    return lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)


def _entries(options: Namespace, key: Any, operator: lx.AbstractLinearOperator) -> _Question:
    """Trace or diagonal of the matrix, which are read, or of a function of it."""
    of_trace = options.command == "trace"
    axis = {} if of_trace else {"index": np.arange(operator.in_size())}
    if options.function is None:
        given: Any = (tr.trace if of_trace else tr.diagonal), key, operator
    elif options.function == "inv":
        given = (tr.inverse_trace if of_trace else tr.inverse_diagonal), key, _definite(operator)
    else:
        call = tr.spectral_sum if of_trace else tr.spectral_diagonal
        given = call, key, _FUNCTIONS[options.function], operator
    return _Question(functools.partial(*given), axis)


def _logdet(options: Namespace, key: Any, operator: lx.AbstractLinearOperator) -> _Question:
    """A log-determinant, or a curve of them for A + s I from the same products, where A itself need
    not be definite.
    """
    if options.shift:
        operator = operator + options.shift * lx.IdentityLinearOperator(operator.in_structure())
    preconditioner = _PRECONDITIONERS[options.preconditioner]
    logdet = functools.partial(tr.logdet, key, preconditioner=preconditioner)
    if options.shifts is not None:
        estimate = functools.partial(logdet, operator, shifts=options.shifts)
        return _Question(estimate, {"shift": options.shifts}, plot.shifts)
    if options.plot:
        raise ValueError("--plot is for a curve over several shifts. Add --shifts 0.01,0.1,1.")
    return _Question(functools.partial(logdet, _definite(operator)), {})


def _density(options: Namespace, key: Any, operator: lx.AbstractLinearOperator) -> _Question:
    """The density of the eigenvalues, on a grid that spans the spectrum unless one is given."""
    n = operator.in_size()
    ends_key, key = jax.random.split(key)
    width = options.width
    products = 0
    if options.range is not None:
        low, high = options.range
        width = abs(high - low) / 20 if width is None else width
    else:
        products = min(n, max(2, min(30, options.k // 4)))
        values = tr.eigenpairs(ends_key, operator, products, min(n, 2), "BE").values
        low, high = values.min(), values.max()
        size = jnp.maximum(abs(low), abs(high))  # multiples of the identity have no extent
        extent = jnp.maximum(high - low, jnp.where(size > 0, size, 1) / 100)
        width = extent / 20 if width is None else width
        low, high = low - 3 * width, high + 3 * width
    grid = jnp.linspace(low, high, options.points)

    def estimate(k: int) -> tr.Solution:
        left = k if k >= n else max(1, k - products)
        return tr.spectral_density(key, operator, left, grid, width=width)

    return _Question(estimate, {"grid": grid}, plot.spectral_density, products)


# --- what is printed -----------------------------------------------------------------------------


def _text(name: str, value: Any) -> str:
    """A cell of the table."""
    if isinstance(value, list):
        return f"[{', '.join(_text(name, number) for number in value)}]"
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if name in ("std_err", "quadrature_error") else f"{value:.10g}"


def _rows(columns: dict[str, np.ndarray], top: int) -> Any:
    """The rows of the table: the largest entries of a diagonal, or some points of a curve."""
    if "index" in columns:
        return np.argsort(-abs(columns["value"]))[:top]
    points = columns["value"].size
    return np.unique(np.linspace(0, points - 1, min(points, _ROWS_OF_A_CURVE)).round().astype(int))


def _table(report: dict[str, Any], columns: dict[str, np.ndarray], rows: Any) -> str:
    """The numbers of the report, one a line, and below them the given rows of the columns."""
    numbers = {name: value for name, value in report.items() if name not in columns}
    lines = [f"{name:<16} {_text(name, value)}" for name, value in numbers.items()]
    if columns:
        lines += ["", "".join(f"{name:<18}" for name in columns)]
    for row in rows:
        cells = (_text(name, column[row].item()) for name, column in columns.items())
        lines.append("".join(f"{cell:<18}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def _estimates(solution: tr.Solution, exact: tr.Solution | None) -> dict[str, np.ndarray]:
    """Value, errors, interval of 95 %, and the exact value beside them."""
    low, high = solution.interval()
    numbers = {"value": solution.value, "std_err": solution.std_err}
    if solution.quadrature_error is not None:
        numbers["quadrature_error"] = solution.quadrature_error
    numbers |= {"low": low, "high": high} if low.ndim else {"interval": jnp.stack([low, high])}
    if exact is not None:
        numbers["exact"] = exact.value
    return {name: np.asarray(number) for name, number in numbers.items()}


def _run(options: Namespace) -> str:
    """Compute, print and draw; returns a message, empty if the result can be trusted."""
    if options.plot:
        importlib.import_module("matplotlib")  # that it is missing is said before anything is done
    is_function = options.command in ("logdet", "density") or options.function is not None
    operator = read_operator(
        options.file, options.dtype, is_psd=options.psd, needs_symmetry=is_function
    )
    n = operator.in_size()
    spending = {"k": options.k} if options.rtol is None else {"rtol": options.rtol}
    start = time.perf_counter()
    question = options.ask(options, jax.random.key(options.seed), operator)
    solution = jax.block_until_ready(question.estimate(**spending))
    seconds = time.perf_counter() - start
    exact = question.estimate(k=n) if options.exact else None
    numbers = {**question.axis, **_estimates(solution, exact)}
    report = {"file": options.file, "n": n, "dtype": str(operator.in_structure().dtype)}
    report |= {name: np.asarray(number).tolist() for name, number in numbers.items()}
    report["num_matvecs"] = solution.num_matvecs.item() + question.products
    report["seconds"] = round(seconds, 2)
    # The exact value shows what k products may miss, such as a few negative eigenvalues.
    outcomes = [solution.result] if exact is None else [exact.result, solution.result]
    result = next((each for each in outcomes if tr.RESULTS[each]), solution.result)
    report["result"] = outcome_of(result)
    columns = numbers if question.axis else {}
    rows = _rows(columns, options.top) if columns else ()
    print(json.dumps(report, default=str) if options.json else _table(report, columns, rows))
    if options.plot and not tr.RESULTS[result]:
        (axis,) = question.axis.values()
        axes = question.draw(axis, solution, exact=numbers.get("exact"))
        axes.figure.savefig(options.plot, dpi=150)
    return tr.RESULTS[result]


# --- arguments -----------------------------------------------------------------------------------


def _numbers(text: str) -> np.ndarray:
    """The type of an argument with several numbers, which are sorted."""
    return np.sort([float(number) for number in text.split(",")])


_COMMANDS = {
    "trace": (_entries, "the trace of a matrix (exactly), or that of a function of it"),
    "diagonal": (_entries, "the diagonal of a matrix (exactly), or that of a function of it"),
    "logdet": (_logdet, "the log-determinant of a positive definite matrix"),
    "density": (_density, "the density of the eigenvalues of a symmetric matrix"),
}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="traceax", description="Traces, diagonals, log-determinants and spectra of matrices."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('traceax')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (ask, what) in _COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"Estimate {what}.")
        command.set_defaults(ask=ask, function=None, rtol=None, top=5, plot=None)
        add = command.add_argument
        add("file", metavar="FILE", help="Matrix Market .mtx or .mtx.gz, SciPy .npz, NumPy .npy")
        add("--seed", type=int, default=0, help="of the random key (default 0)")
        add("--dtype", choices=("float32", "float64", "complex64", "complex128"))
        add("--psd", action="store_true", help="the matrix is positive semidefinite")
        add("--exact", action="store_true", help="also compute the exact value")
        add("--json", action="store_true", help="print one JSON object, with all entries")
        spending = command.add_mutually_exclusive_group()
        spending.add_argument("-k", type=int, default=100, help="products to spend (default 100)")
        if name in ("trace", "diagonal"):
            spending.add_argument("--rtol", type=float, help="instead of -k: a relative error")
            add("--function", choices=tuple(_FUNCTIONS), help="of this function of the matrix")
        else:
            add("--plot", metavar="OUT", help="draw the curve, with matplotlib: .png, .pdf, .svg")
    add = commands.choices["diagonal"].add_argument
    add("--top", type=int, default=5, help="the N largest entries (default 5)", metavar="N")
    add = commands.choices["logdet"].add_argument
    add("--shift", type=float, default=0.0, metavar="S", help="of A + S I instead")
    add("--shifts", type=_numbers, metavar="S,S,...", help="of A + S I for each of these")
    add("--preconditioner", choices=tuple(_PRECONDITIONERS), default="auto")
    add = commands.choices["density"].add_argument
    add("--points", type=int, default=200, metavar="N", help="of the grid (default 200)")
    add("--range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="the ends of the grid")
    add("--width", type=float, metavar="W", help="of the Gaussian that replaces each eigenvalue")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code: 0 for success; 1 if the result cannot be
    trusted; 2 for bad input, with one line on standard error.
    """
    jax.config.update("jax_enable_x64", True)
    options = _parser().parse_args(argv)
    try:
        message = _run(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"traceax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if message:
        print(f"traceax: {message}", file=sys.stderr)
    return 1 if message else 0
