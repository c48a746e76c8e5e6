"""Matrices in files, for the command line."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

from .._operators.sparse import SparseLinearOperator


class MatrixFileError(ValueError):
    """A file does not hold a matrix that can be used. The message says why, in one line."""


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# SciPy is imported inside functions, so that the package imports fast without it.
def _read_mtx(path: Path) -> Any:
    from scipy.io import mmread

    if "spmatrix" in inspect.signature(mmread).parameters:  # SciPy 1.14 has no such argument
        return mmread(path, spmatrix=False)
    return mmread(path)


def _read_npz(path: Path) -> Any:
    from scipy.sparse import load_npz

    with path.open("rb") as file:  # given a path, SciPy would leave a broken file open
        return load_npz(file)


def _read_npy(path: Path) -> Any:
    with path.open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


_READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    ".mtx": (_read_mtx, "a Matrix Market file"),
    ".mtx.gz": (_read_mtx, "a compressed Matrix Market file"),
    ".npz": (_read_npz, "written by `scipy.sparse.save_npz`"),
    ".npy": (_read_npy, "an array of numbers written by `numpy.save`"),
}


def _load(path: Path) -> Any:
    suffix = next((s for s in _READERS if path.name.lower().endswith(s)), None)
    if suffix is None:
        raise MatrixFileError(
            f"{path}: unknown kind of file '{path.suffix}'; use one of {', '.join(_READERS)}."
        )
    if not path.exists():
        raise MatrixFileError(f"{path}: there is no such file; check the path.")
    if path.is_dir():
        raise MatrixFileError(f"{path}: is a directory; give the path of a file in it.")
    reader, kind = _READERS[suffix]
    try:
        return reader(path)
    except Exception as error:  # parsers raise exceptions of many kinds
        raise MatrixFileError(
            f"{path}: cannot be read ({_one_line(error)}); it should be {kind}."
        ) from error


def _target_dtype(path: Path, found: np.dtype, wanted: Any) -> np.dtype:
    if found.kind not in "biufc":
        raise MatrixFileError(
            f"{path}: the entries are no numbers (dtype {found}); convert the array with "
            "`.astype(float)`."
        )
    if wanted is None:
        if found.kind not in "fc":
            wanted = np.float64
        else:  # in native byte order, and no wider than JAX's dtypes
            widest = np.complex128 if found.kind == "c" else np.float64
            wanted = min(found.newbyteorder("="), np.dtype(widest), key=lambda d: d.itemsize)
    try:
        dtype = np.dtype(jnp.dtype(wanted))
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        raise MatrixFileError(
            f"{path}: cannot be read with dtype {wanted}; use a real or complex floating-point "
            "dtype such as float32."
        )
    if found.kind == "c" and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise MatrixFileError(
            f"{path}: the entries are complex ({found}), and dtype {dtype} would drop their "
            "imaginary parts; use complex64 or complex128."
        )
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _asymmetry(matrix: Any) -> float:
    """The largest difference between an entry and its (conjugated) mirror image. Differences that
    are NaN do not count: the estimators report NaN.
    """
    with np.errstate(invalid="ignore"):
        difference = matrix - matrix.conj().T
        sizes = np.abs(difference if isinstance(difference, np.ndarray) else difference.data)
    return float(np.max(sizes, initial=0.0, where=~np.isnan(sizes)))


def read_matrix(
    path: str | os.PathLike[str], dtype: Any = None, *, hermitian: bool = False
) -> lx.AbstractLinearOperator:
    """Read a square matrix from a file.

    **Arguments:**

    - `path`: a Matrix Market file (`.mtx`, `.mtx.gz`), a SciPy sparse matrix (`.npz`, from
        `scipy.sparse.save_npz`) or a NumPy array (`.npy`). The suffix decides.
    - `dtype`: the floating-point dtype of the operator. By default the dtype of the file, or
        float64 for integers and booleans. Double precision becomes single precision where JAX's
        64-bit types are disabled.
    - `hermitian`: whether the matrix must be Hermitian (symmetric, if it is real).

    **Returns:**

    A `SparseLinearOperator` for a sparse matrix, a `lineax.MatrixLinearOperator` for a dense one,
    tagged `lineax.symmetric_tag` if it is real and equals its transpose exactly. NaN and infinite
    entries are let through: the estimators report them.

    **Raises:**

    - `MatrixFileError`: if there is no such file, its suffix is unknown, it cannot be parsed, it
        does not hold a square matrix of numbers, `dtype` cannot hold the entries, or the matrix is
        not Hermitian but must be.
    """
    path = Path(path)
    matrix = _load(path)
    shape = "x".join(map(str, matrix.shape))
    if len(matrix.shape) != 2:
        raise MatrixFileError(
            f"{path}: holds an array with {len(matrix.shape)} dimensions (shape {matrix.shape}); "
            "a matrix needs two."
        )
    if matrix.shape[0] != matrix.shape[1]:
        raise MatrixFileError(f"{path}: the matrix is {shape}; only square matrices can be used.")
    if matrix.shape[0] == 0:
        raise MatrixFileError(f"{path}: the matrix is empty ({shape}); it needs at least one row.")
    target = _target_dtype(path, matrix.dtype, dtype)
    # SciPy has no sparse matrices of half precision: JAX converts to the target dtype at the end.
    matrix = matrix.astype(np.complex128 if matrix.dtype.kind == "c" else np.float64)

    is_sparse = not isinstance(matrix, np.ndarray)
    if is_sparse:
        matrix = matrix.tocsr()
        matrix.sum_duplicates()
    is_real, asymmetry = matrix.dtype.kind == "f", _asymmetry(matrix)
    if hermitian and asymmetry > 0:
        kind, mirrored = ("symmetric", "A^T") if is_real else ("Hermitian", "A^H")
        raise MatrixFileError(
            f"{path}: the matrix is not {kind} (entries and their mirror images differ by up to "
            f"{asymmetry:.3g}), as it must be; (A + {mirrored}) / 2 would be."
        )
    tags = (lx.symmetric_tag,) if is_real and asymmetry == 0 else ()
    if not is_sparse:
        return lx.MatrixLinearOperator(jnp.asarray(matrix).astype(target), tags)
    operator = SparseLinearOperator(matrix, tags)
    return operator.with_data(operator.data.astype(target))
