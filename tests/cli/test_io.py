"""`read_matrix` against the matrix that was written."""

import gzip
import re

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.io
import scipy.sparse as ss

from traceax._cli.files import MatrixFileError, read_matrix
from traceax._operators.sparse import SparseLinearOperator


def _dense(dtype="float64", n=7):
    rng = np.random.default_rng(0)
    matrix = rng.integers(-4, 5, (n, n)) * (rng.random((n, n)) < 0.4)
    if np.dtype(dtype).kind == "c":
        matrix = matrix + 1j * np.triu(matrix)
    return matrix.astype(dtype)


SYMMETRIC = _dense() + _dense().T


def _save(path, matrix):
    """Write a NumPy array or SciPy sparse matrix in the format that the suffix asks for."""
    if path.name.endswith(".mtx.gz"):
        plain = path.with_suffix("")
        scipy.io.mmwrite(plain, matrix)
        path.write_bytes(gzip.compress(plain.read_bytes()))
    elif path.suffix == ".mtx":
        scipy.io.mmwrite(path, matrix)
    elif path.suffix == ".npz":
        ss.save_npz(path, matrix)
    else:
        np.save(path, matrix)
    return path


@pytest.mark.parametrize("suffix", [".mtx", ".mtx.gz", ".npz", ".MTX", ".NPZ"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "complex128"])
def test_sparse(tmp_path, suffix, dtype):
    dense = _dense(dtype)
    path = _save(tmp_path / f"a{suffix.lower()}", ss.coo_array(dense))
    path = path.rename(tmp_path / f"b{suffix}")
    operator = read_matrix(path)
    assert isinstance(operator, SparseLinearOperator)
    assert operator.tags == frozenset()
    assert operator.nnz == np.count_nonzero(dense)
    kept = {"int64": "float64", "float32": "float64" if "mtx" in suffix.lower() else "float32"}
    assert operator.data.dtype == jnp.dtype(kept.get(dtype, dtype))  # text has no float32
    np.testing.assert_array_equal(operator.as_matrix(), dense)


@pytest.mark.parametrize("fmt", ["csr", "csc", "coo", "bsr", "dia"])
@pytest.mark.parametrize("kind", ["array", "matrix"])
def test_npz_formats(tmp_path, fmt, kind):
    matrix = getattr(ss, f"{fmt}_{kind}")(_dense())
    operator = read_matrix(_save(tmp_path / "a.npz", matrix))
    assert isinstance(operator, SparseLinearOperator)
    np.testing.assert_array_equal(operator.as_matrix(), _dense())


@pytest.mark.parametrize("suffix", [".mtx", ".mtx.gz", ".npy"])
@pytest.mark.parametrize("dtype", ["float64", "int32", "complex128"])
def test_dense(tmp_path, suffix, dtype):
    dense = _dense(dtype)
    operator = read_matrix(str(_save(tmp_path / f"a{suffix}", dense)))
    assert isinstance(operator, lx.MatrixLinearOperator)
    assert operator.matrix.dtype == jnp.dtype({"int32": "float64"}.get(dtype, dtype))
    np.testing.assert_array_equal(operator.as_matrix(), dense)


@pytest.mark.parametrize("dtype", ["bool", "uint8", ">f8", ">f4", "<f2", "longdouble"])
def test_dtypes_of_npy(tmp_path, dtype):
    dense = np.abs(_dense()).astype(dtype)
    operator = read_matrix(_save(tmp_path / "a.npy", dense))
    kept = {">f4": "float32", "<f2": "float16"}.get(dtype, "float64")
    assert operator.matrix.dtype == jnp.dtype(kept)
    np.testing.assert_array_equal(operator.as_matrix(), dense.astype(kept))


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
@pytest.mark.parametrize(
    "wanted", ["float16", "bfloat16", "float32", jnp.float64, np.dtype("complex64"), "complex128"]
)
def test_wanted_dtype(tmp_path, suffix, wanted):
    dense = _dense()
    operator = read_matrix(
        _save(tmp_path / f"a{suffix}", dense if suffix == ".npy" else ss.csr_array(dense)), wanted
    )
    assert operator.in_structure().dtype == jnp.dtype(wanted)
    np.testing.assert_array_equal(operator.as_matrix().astype("complex128"), dense)


def test_without_64_bits(tmp_path):
    path = _save(tmp_path / "a.npz", ss.csr_array(_dense()))
    with jax.enable_x64(False):
        for wanted in (None, "float64"):
            assert read_matrix(path, wanted).in_structure().dtype == jnp.float32


@pytest.mark.parametrize(
    ("suffix", "is_sparse"), [(".mtx", True), (".mtx", False), (".npz", True), (".npy", False)]
)
def test_symmetric_tag(tmp_path, suffix, is_sparse):
    for matrix, is_symmetric in ((SYMMETRIC, True), (_dense(), False)):
        path = tmp_path / f"{is_symmetric}{suffix}"
        operator = read_matrix(_save(path, ss.csr_array(matrix) if is_sparse else matrix))
        assert lx.is_symmetric(operator) is is_symmetric
        np.testing.assert_array_equal(operator.as_matrix(), matrix)
        np.testing.assert_array_equal(operator.T.as_matrix(), matrix.T)


def test_almost_symmetric_is_not_symmetric(tmp_path):
    matrix = SYMMETRIC.copy()
    matrix[0, 1] += 1e-12
    assert not lx.is_symmetric(read_matrix(_save(tmp_path / "a.npz", ss.csr_array(matrix))))
    assert not lx.is_symmetric(read_matrix(_save(tmp_path / "a.npy", matrix)))


@pytest.mark.parametrize("is_sparse", [False, True])
def test_hermitian_if_it_must_be(tmp_path, is_sparse):
    def save(matrix):
        return _save(tmp_path / ("a.npz" if is_sparse else "a.npy"), matrix)

    def read(matrix):
        return read_matrix(save(ss.csr_array(matrix) if is_sparse else matrix), hermitian=True)

    matrix = SYMMETRIC.copy()
    assert lx.is_symmetric(read(matrix))
    np.testing.assert_array_equal(read(matrix + 0j).as_matrix(), matrix)
    matrix[0, 1] += 0.125
    with pytest.raises(MatrixFileError, match=r"not symmetric .* up to 0.125\)"):
        read(matrix)
    with pytest.raises(MatrixFileError, match=r"not Hermitian .* up to 0.125\)"):
        read(matrix + 0j)
    rotated = SYMMETRIC + 1j * np.triu(SYMMETRIC, 1)
    with pytest.raises(MatrixFileError, match="not Hermitian"):
        read(rotated + np.triu(rotated, 1).T - np.triu(SYMMETRIC, 1))
    upper = np.triu(rotated, 1)
    read(np.diag(np.diag(SYMMETRIC)) + upper + upper.conj().T)
    matrix = SYMMETRIC.copy()
    matrix[0, 1] = matrix[1, 0] = np.nan  # in both places: the estimators report it
    assert lx.is_symmetric(read(matrix))


def test_explicit_zeros_do_not_hide_symmetry(tmp_path):
    coo = ss.coo_array((np.array([0.0, 3.0]), (np.array([0, 1]), np.array([1, 1]))), shape=(2, 2))
    assert lx.is_symmetric(read_matrix(_save(tmp_path / "a.npz", coo)))


def test_hermitian_is_not_tagged_symmetric(tmp_path):
    hermitian = _dense("complex128") + _dense("complex128").conj().T
    for path, matrix in (("a.npy", hermitian), ("a.mtx", ss.csr_array(hermitian))):
        operator = read_matrix(_save(tmp_path / path, matrix))
        assert not lx.is_symmetric(operator)
        np.testing.assert_array_equal(operator.as_matrix(), hermitian)


def test_duplicates_in_a_matrix_market_file_are_summed(tmp_path):
    path = tmp_path / "a.mtx"
    path.write_text("%%MatrixMarket matrix coordinate real general\n2 2 3\n1 1 1\n1 1 2\n2 1 4\n")
    operator = read_matrix(path)
    np.testing.assert_array_equal(operator.as_matrix(), [[3.0, 0.0], [4.0, 0.0]])


@pytest.mark.parametrize("field", ["pattern", "integer"])
def test_fields_of_a_matrix_market_file(tmp_path, field):
    value = {"pattern": "", "integer": " 1"}[field]
    path = tmp_path / "a.mtx"
    path.write_text(
        f"%%MatrixMarket matrix coordinate {field} symmetric\n3 3 2\n1 1{value}\n3 1{value}\n"
    )
    operator = read_matrix(path)
    assert lx.is_symmetric(operator)
    assert operator.data.dtype == jnp.float64
    np.testing.assert_array_equal(operator.as_matrix(), [[1, 0, 1], [0, 0, 0], [1, 0, 0]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_entries_that_are_not_finite_are_let_through(tmp_path, bad):
    dense = SYMMETRIC.copy()
    dense[2, 2] = bad
    for path, matrix in (("a.npy", dense), ("a.npz", ss.csr_array(dense))):
        np.testing.assert_array_equal(
            read_matrix(_save(tmp_path / path, matrix)).as_matrix(), dense
        )


def test_one_by_one(tmp_path):
    operator = read_matrix(_save(tmp_path / "a.npy", np.array([[3]])))
    np.testing.assert_array_equal(operator.mv(jnp.ones(1)), [3.0])


# --- errors ---------------------------------------------------------------------------------


def _write(name, content):
    def write(folder):
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            _save(path, content)
        return path

    return write


def _numpy_archive(folder):
    np.savez(folder / "a.npz", a=np.eye(2))
    return folder / "a.npz"


def _object_array(folder):
    np.save(folder / "a.npy", np.array([[None]]), allow_pickle=True)
    return folder / "a.npy"


def _archive_named_npy(folder):
    return _numpy_archive(folder).rename(folder / "b.npy")


def _truncated(name, content):
    def write(folder):
        path = _save(folder / name, content)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        return path

    return write


def _folder(folder):
    (folder / "a.npy").mkdir()
    return folder / "a.npy"


_HEADER = b"%%MatrixMarket matrix coordinate real general\n"

ERRORS = {
    "missing": (_write("a.mtx", None), "no such file; check the path"),
    "folder": (_folder, "is a directory"),
    "unknown suffix": (_write("a.csv", b"1,2"), r"unknown kind of file '\.csv'; use one of \.mtx"),
    "no suffix": (_write("a", b""), "unknown kind of file ''"),
    "missing and unknown": (_write("a.txt", None), r"unknown kind of file '\.txt'"),
    "empty mtx": (_write("a.mtx", b""), "cannot be read .* should be a Matrix Market file"),
    "empty npy": (_write("a.npy", b""), r"cannot be read .* written by `numpy\.save`"),
    "empty npz": (_write("a.npz", b""), r"cannot be read .* written by `scipy\.sparse\.save_npz`"),
    "garbage mtx": (_write("a.mtx", b"\x00\xff" * 50), "cannot be read"),
    "garbage gz": (_write("a.mtx.gz", b"not gzip at all"), "cannot be read"),
    "garbage npz": (_write("a.npz", b"not a zip file"), "cannot be read"),
    "garbage npy": (_write("a.npy", b"not an array"), "cannot be read"),
    "short mtx": (_write("a.mtx", _HEADER + b"2 2 3\n1 1 1.0\n"), "cannot be read"),
    "index out of range": (_write("a.mtx", _HEADER + b"2 2 1\n3 1 1.0\n"), "cannot be read"),
    "no number": (_write("a.mtx", _HEADER + b"2 2 1\n1 1 one\n"), "cannot be read"),
    "truncated npy": (_truncated("a.npy", np.eye(50)), "cannot be read"),
    "truncated npz": (_truncated("a.npz", ss.eye_array(50).tocsr()), "cannot be read"),
    "truncated gz": (_truncated("a.mtx.gz", _dense(n=50)), "cannot be read"),
    "archive of arrays": (_numpy_archive, "cannot be read"),
    "archive as npy": (_archive_named_npy, "cannot be read"),
    "objects": (_object_array, "cannot be read .*allow_pickle"),
    "vector": (_write("a.npy", np.ones(3)), r"1 dimensions \(shape \(3,\)\); a matrix needs two"),
    "scalar": (_write("a.npy", np.array(1.0)), "0 dimensions"),
    "tensor": (_write("a.npy", np.ones((2, 2, 2))), "3 dimensions"),
    "wide": (_write("a.npy", np.ones((2, 3))), "the matrix is 2x3; only square"),
    "wide sparse": (_write("a.npz", ss.csr_array((4, 5))), "the matrix is 4x5; only square"),
    "tall mtx": (_write("a.mtx", ss.coo_array((3, 2))), "the matrix is 3x2; only square"),
    "empty": (_write("a.npy", np.ones((0, 0))), r"the matrix is empty \(0x0\)"),
    "strings": (_write("a.npy", np.array([["a"]])), "no numbers .dtype <U1"),
    "dates": (_write("a.npy", np.zeros((1, 1), "datetime64[s]")), "no numbers .dtype datetime64"),
    "structured": (_write("a.npy", np.zeros((1, 1), [("x", float)])), "no numbers .dtype"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(tmp_path, name):
    write, message = ERRORS[name]
    path = write(tmp_path)
    with pytest.raises(MatrixFileError, match=message) as info:
        read_matrix(path)
    text = str(info.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: ")
    assert text.endswith(".")
    assert isinstance(info.value, ValueError)


@pytest.mark.parametrize("wanted", ["int32", "bool", "nonsense", object, "U3", 7])
def test_dtypes_that_are_no_floats(tmp_path, wanted):
    path = _save(tmp_path / "a.npy", np.eye(2))
    message = re.escape(f"cannot be read with dtype {wanted}; use")
    with pytest.raises(MatrixFileError, match=message):
        read_matrix(path, wanted)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".mtx"])
def test_complex_entries_do_not_become_real(tmp_path, suffix):
    matrix = _dense("complex128")
    path = _save(tmp_path / f"a{suffix}", matrix if suffix == ".npy" else ss.csr_array(matrix))
    with pytest.raises(MatrixFileError, match=r"complex \(complex128\), and dtype float32"):
        read_matrix(path, "float32")
    assert read_matrix(path, "complex64").in_structure().dtype == jnp.complex64
