"""`traceax diagonal`: the diagonal of a matrix, read from its file, or the diagonal of a function
of it, estimated: from products, and that of the inverse from solves.
"""

import argparse
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr

from .._core.estimate import safe_norm
from .._operators.sparse import SparseLinearOperator
from .common import (
    Command,
    Report,
    Rows,
    add_output,
    add_tag,
    add_tolerance,
    aligned,
    check_output,
    number,
    positive,
    ratio,
    reads,
    solve,
    write_columns,
)
from .files import read_matrix
from .functions import FUNCTIONS, read_hermitian


def _add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--function",
        choices=tuple(FUNCTIONS),
        help="estimate the diagonal of this function of a symmetric matrix, from its products. "
        "That of inv, for a positive definite matrix (the marginal variances, if it is a precision "
        "matrix), comes from solves with the factors of a sparse factorisation, and a matvec is "
        "then such a solve. Without --function the diagonal of the matrix itself is read from the "
        "file, exactly, and the options of an estimate are refused",
    )
    add_tag(command)
    add_tolerance(command, "the diagonal of the inverse, in the l2 norm")
    command.add_argument(
        "--top",
        type=positive,
        default=5,
        metavar="N",
        help="also print the N entries that are largest in magnitude; indices count from 0 "
        "(default 5)",
    )
    add_output(command, "all entries, with their standard errors if they are estimates")


def _factors(matrix: Any) -> Any:
    """SuperLU's factors of a SciPy CSC matrix; None if it is not positive definite to rounding."""
    from scipy.sparse.linalg import splu  # here, so that the package imports fast without SciPy

    try:
        factors = splu(
            matrix,
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
    except RuntimeError:  # a pivot is zero
        return None
    if not np.array_equal(factors.perm_r, factors.perm_c):  # a diagonal entry was zero
        return None
    # The pivots of P A P^T = L D L^H are all positive if and only if A is positive definite. The
    # elimination makes each pivot from its diagonal entry, and leaves only rounding errors of it if
    # A is singular.
    pivots = factors.U.diagonal()[factors.perm_c].real
    rounding = np.finfo(pivots.dtype).eps * pivots.size
    return factors if (pivots > rounding * matrix.diagonal().real).all() else None


def _inverse(operator: lx.AbstractLinearOperator) -> tuple[lx.AbstractLinearOperator, Any]:
    """The inverse of a matrix from a file, by a factorisation in double precision.

    **Arguments:**

    - `operator`: the symmetric (Hermitian) matrix.

    **Returns:**

    The inverse, in the operator's dtype, and None. If the matrix has no such inverse: an operator
    of NaN, and the result that says what is wrong with the matrix.
    """
    from scipy.sparse import coo_array

    if isinstance(operator, SparseLinearOperator):
        places = np.asarray(operator.pattern.rows), np.asarray(operator.pattern.columns)
        matrix = coo_array((np.asarray(operator.data), places), operator.pattern.shape)
    else:
        matrix = coo_array(np.asarray(operator.as_matrix()))
    structure = operator.in_structure()
    wide = np.promote_types(structure.dtype, np.float64)
    matrix = matrix.astype(wide).tocsc()
    is_finite = np.isfinite(matrix.data).all()
    factors = _factors(matrix) if is_finite else None
    if factors is None:
        wrong = tr.RESULTS.outside_domain if is_finite else tr.RESULTS.nonfinite_operator
        nothing = jnp.full(structure.shape, jnp.nan, structure.dtype)
        return lx.DiagonalLinearOperator(nothing), wrong

    def on_host(vectors):
        rows = np.asarray(vectors, wide).reshape(-1, structure.shape[0])
        solved = factors.solve(np.ascontiguousarray(rows.T)).T
        return solved.reshape(vectors.shape).astype(structure.dtype)

    def product(vector):
        return jax.pure_callback(on_host, structure, vector, vmap_method="broadcast_all")

    return lx.FunctionLinearOperator(product, structure, lx.positive_semidefinite_tag), None


def _read(arguments: argparse.Namespace) -> tuple[dict[str, Any], Report, str]:
    operator = read_matrix(arguments.file, arguments.dtype)
    solution, report, message = solve(
        arguments, operator, lambda key, k: tr.diagonal(key, operator, operator.in_size())
    )
    return {"exact": solution.value}, report, message


def _estimate(arguments: argparse.Namespace) -> tuple[dict[str, Any], Report, str]:
    operator = read_matrix(arguments.file, arguments.dtype, hermitian=True)
    inverse, wrong = _inverse(operator)

    def estimate(key, **spent):
        solution = tr.diagonal(key, inverse, **spent)
        return solution if wrong is None else dataclasses.replace(solution, result=wrong)

    solution, report, message = solve(arguments, operator, estimate, function=arguments.function)
    # The diagonal of a Hermitian matrix is real, but an estimate of it is real only on average.
    columns = {"estimate": solution.value.real, "std_err": solution.std_err}
    if arguments.exact:
        columns["exact"] = estimate(jax.random.key(0), k=operator.in_size()).value.real
    return columns, report, message


def _estimate_function(arguments: argparse.Namespace) -> tuple[dict[str, Any], Report, str]:
    name = arguments.function
    if arguments.k is None:
        raise ValueError(
            f"--rtol and --atol are for the diagonal of the inverse: for {name} give a budget, -k."
        )
    operator = read_hermitian(arguments)

    def estimate(key, k):
        return tr.spectral_diagonal(key, FUNCTIONS[name], operator, k)

    solution, report, message = solve(arguments, operator, estimate, function=name)
    columns = {
        "estimate": solution.value,
        "std_err": solution.std_err,
        "quadrature_error": solution.quadrature_error,
    }
    if arguments.exact:
        exact = estimate(jax.random.key(0), operator.in_size())
        columns["exact"] = exact.value
        # The exact value shows what k products may miss, such as a few negative eigenvalues.
        message = tr.RESULTS[exact.result] or message
    return columns, report, message


def _run(arguments: argparse.Namespace) -> tuple[Report, str]:
    check_output(arguments.output)
    if reads(arguments):
        columns, report, message = _read(arguments)
    elif arguments.function == "inv":
        columns, report, message = _estimate(arguments)
    else:
        columns, report, message = _estimate_function(arguments)
    # Sums over many entries are made in double precision, whatever the dtype of the entries.
    columns = {
        name: column.astype(np.promote_types(column.dtype, np.float64))
        for name, column in columns.items()
    }
    write_columns(arguments.output, **columns)

    def entry(index: Any) -> dict[str, Any]:
        return {"index": int(index), **{name: c[index].item() for name, c in columns.items()}}

    values = next(iter(columns.values()))
    sizes = jnp.abs(values)
    order = sizes if jnp.iscomplexobj(values) else values
    report["sum"] = values.sum().item()
    report["smallest"] = entry(order.argmin())
    report["largest"] = entry(order.argmax())
    report["top"] = [entry(index) for index in jnp.argsort(-sizes)[: arguments.top]]
    if "std_err" in columns:
        for error in ("std_err", "quadrature_error"):
            if error in columns:
                rms = safe_norm(columns[error]).item() / math.sqrt(values.size)
                report[f"rms_{error}"] = rms
        if "exact" in columns:
            exact = columns["exact"]
            errors = jnp.abs(values - exact)
            size = safe_norm(jnp.abs(exact)).item()
            report["relative_error"] = ratio(safe_norm(errors).item(), size)
            within = errors <= 2 * columns["std_err"] + columns.get("quadrature_error", 0)
            report["within_two_std_errs"] = within.mean().item()
    return report, message


def _rows(report: Report) -> tuple[Rows, Rows]:
    top = report["top"]
    names = list(top[0])
    main = names[1]

    def extreme(entry: dict[str, Any]) -> str:
        by = " (by magnitude)" if isinstance(entry[main], complex) else ""
        return f"{number(entry[main])} at index {entry['index']}{by}"

    results = [
        *([("function", report["function"])] if "function" in report else []),
        ("entries", str(report["n"])),
        ("sum", number(report["sum"])),
        ("smallest entry", extreme(report["smallest"])),
        ("largest entry", extreme(report["largest"])),
    ]
    rows = []
    if "rms_std_err" in report:
        mean = f"{report['rms_std_err']:.3g} (root mean square)"
        results.append(("standard error", mean))
    if "rms_quadrature_error" in report:
        mean = f"{report['rms_quadrature_error']:.3g} (root mean square)"
        results.append(("quadrature error", mean))
    if "relative_error" in report:
        within = 100 * report["within_two_std_errs"]
        more = ", and the quadrature error" if "rms_quadrature_error" in report else ""
        within = f"{within:.1f} % of the entries (two standard errors{more})"
        rows.append(("relative error", f"{report['relative_error']:.3g} (in the l2 norm)"))
        rows.append(("within 2 errors", within))
    labels = {
        "index": "index (from 0)",
        "std_err": "standard error",
        "quadrature_error": "quadrature error",
    }
    texts = {"index": str, "std_err": "{:.3g}".format, "quadrature_error": "{:.3g}".format}
    columns = [
        [labels.get(name, name), *(texts.get(name, number)(entry[name]) for entry in top)]
        for name in names
    ]
    return results, [*rows, ("", ""), *aligned(columns)]


DIAGONAL = Command(
    "diagonal",
    "the exact diagonal of a matrix, or an estimate of that of a function of it",
    _add_arguments,
    _run,
    _rows,
)
