"""`traceax diagonal`: the diagonal of a matrix, read from its file, or the diagonal of its inverse,
estimated from solves.
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


def _add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--function",
        choices=("inv",),
        help="estimate the diagonal of the inverse of a symmetric positive definite matrix (the "
        "marginal variances, if it is a precision matrix); a matvec is then a solve with the "
        "factors of a sparse factorisation, and only for inv is there such a product. Without "
        "--function the diagonal of the matrix itself is read from the file, exactly, and the "
        "options of an estimate are refused",
    )
    add_tolerance(command, "the diagonal, in the l2 norm")
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


def _run(arguments: argparse.Namespace) -> tuple[Report, str]:
    check_output(arguments.output)
    columns, report, message = (_read if reads(arguments) else _estimate)(arguments)
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
        report["rms_std_err"] = safe_norm(columns["std_err"]).item() / math.sqrt(values.size)
        if "exact" in columns:
            exact = columns["exact"]
            errors = jnp.abs(values - exact)
            size = safe_norm(jnp.abs(exact)).item()
            report["relative_error"] = ratio(safe_norm(errors).item(), size)
            within = errors <= 2 * columns["std_err"]
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
    if "relative_error" in report:
        within = 100 * report["within_two_std_errs"]
        rows.append(("relative error", f"{report['relative_error']:.3g} (in the l2 norm)"))
        rows.append(("within 2 errors", f"{within:.1f} % of the entries (two standard errors)"))
    labels = {"index": "index (from 0)", "std_err": "standard error"}
    texts = {"index": str, "std_err": "{:.3g}".format}
    columns = [
        [labels.get(name, name), *(texts.get(name, number)(entry[name]) for entry in top)]
        for name in names
    ]
    return results, [*rows, ("", ""), *aligned(columns)]


DIAGONAL = Command(
    "diagonal",
    "the exact diagonal of a matrix, or an estimate of that of its inverse",
    _add_arguments,
    _run,
    _rows,
)
