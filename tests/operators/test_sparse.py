"""`SparseLinearOperator` against the dense matrix it stands for."""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
import pytest
import scipy.sparse as ss
from jax.experimental import sparse as jsparse

from traceax._operators.sparse import _MAX_PADDING, SparseLinearOperator
from traceax._operators.tags import CHECKS

FORMATS = ["csr", "csc", "coo", "bsr", "dia", "lil", "dok"]


def _numbers(shape, seed=3, dtype="float64"):
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(shape)
    return numbers + 1j * rng.standard_normal(shape) if dtype == "complex128" else numbers


def _dense(m, n, density=0.3, seed=0, dtype="float64"):
    kept = np.random.default_rng(seed + 100).random((m, n)) < density
    return np.where(kept, _numbers((m, n), seed, dtype), 0)


def _structures():
    """Name -> dense matrix: the shapes of sparsity that a layout could get wrong."""
    rng = np.random.default_rng(1)
    arrow = np.diag(np.arange(1.0, 301))
    arrow[0], arrow[:, 0] = 1.0 + np.arange(300), 2.0 - np.arange(300)
    lengths = np.minimum((rng.pareto(1.0, 99) * 2).astype(int), 99)
    power = np.zeros((99, 99))
    for i, length in enumerate(lengths):
        power[i, rng.choice(99, length, replace=False)] = rng.standard_normal(length)
    one_dense_row = np.eye(257)
    one_dense_row[100] = rng.standard_normal(257)
    return {
        "tall": _dense(50, 20),
        "wide": _dense(20, 50),
        "all_wide": rng.standard_normal((7, 131)),
        "one_entry": _dense(1, 1, 1.1),
        "no_entries": np.zeros((5, 5)),
        "no_entries_wide": np.zeros((3, 8)),
        "last_rows_empty": np.diag([1.0, 2.0, 0.0, 0.0]),
        "empty_rows": np.where(np.arange(60)[:, None] % 2, _dense(60, 60, 0.2), 0),
        "arrow": arrow,
        "power_law": power,
        "one_dense_row": one_dense_row,
    }


STRUCTURES = _structures()


def _operator(dense, dtype="float64", tags=()):
    operator = SparseLinearOperator(ss.csr_array(dense), tags)
    return operator.with_data(np.asarray(operator.data).astype(jnp.dtype(dtype)))


@eqx.filter_jit
def _matrix(operator):
    return operator.as_matrix()


def _assert_close(actual, expected, dtype="float64"):
    assert actual.dtype == expected.dtype == np.dtype(dtype)
    assert actual.shape == expected.shape
    atol = 200 * np.finfo(dtype).eps * max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@eqx.filter_jit
def _mm(operator, block):
    return jax.vmap(operator.mv, in_axes=1, out_axes=1)(block)


# --- construction ---------------------------------------------------------------------------


def test_scipy_formats():
    """Entries are in row-major order, whatever the format is."""
    dense = _dense(12, 8)
    matrices = [ss.csr_array(dense).asformat(fmt) for fmt in FORMATS]
    for matrix in [*matrices, ss.coo_matrix(dense)]:
        operator = SparseLinearOperator(matrix)
        np.testing.assert_array_equal(_matrix(operator), dense)
        data = np.asarray(operator.data)
        np.testing.assert_array_equal(data[data != 0], dense[dense != 0])


def test_scipy_duplicates_are_summed_and_the_matrix_is_left_alone():
    # One row with unsorted columns and a duplicate: a CSR matrix that is not canonical.
    csr = ss.csr_array(
        (np.array([1.0, 2.0, 4.0]), np.array([2, 0, 2]), np.array([0, 3, 3])), shape=(2, 3)
    )
    operator = SparseLinearOperator(csr)
    np.testing.assert_array_equal(operator.data, [2.0, 5.0])
    np.testing.assert_array_equal(_matrix(operator), [[2.0, 0.0, 5.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(csr.data, [1.0, 2.0, 4.0])
    np.testing.assert_array_equal(csr.indices, [2, 0, 2])


def test_buffers_longer_than_the_entries():
    buffers = np.array([1.0, 2.0, np.nan]), np.array([0, 1, 0]), np.array([0, 1, 2])
    for matrix in (
        ss.csr_array(buffers, shape=(2, 2)),
        jsparse.BCSR(tuple(map(jnp.asarray, buffers)), shape=(2, 2)),
    ):
        np.testing.assert_array_equal(_matrix(SparseLinearOperator(matrix)), np.diag([1.0, 2.0]))


def test_unsorted_bcoo_with_duplicates_and_padding():
    """The order of the data remains, duplicates are added, and padding may hold anything."""
    indices = jnp.array([[2, 0], [0, 1], [3, 3], [2, 0], [1, 1], [2, 2]])
    data = jnp.array([1.0, 2.0, np.nan, 4.0, 8.0, 16.0])
    dense = np.array([[0.0, 2.0, 0.0], [0.0, 8.0, 0.0], [5.0, 0.0, 16.0]])
    weights, vector = jnp.array([1.0, 10.0, 100.0]), jnp.array([3.0, 5.0, 7.0])

    @jax.jit  # the data may be traced, the indices may not
    def views(data, indices=indices):
        operator = SparseLinearOperator(jsparse.BCOO((data, indices), shape=(3, 3)))
        found = operator.mv(vector), operator.T.mv(vector), lx.diagonal(operator)
        return weights @ found[0], (operator.as_matrix(), found)

    with pytest.raises(TypeError, match="make the operator outside"):
        views(data, indices)
    slope, (matrix, found) = jax.grad(views, has_aux=True)(data)
    np.testing.assert_array_equal(matrix, dense)
    np.testing.assert_array_equal(found, [dense @ vector, dense.T @ vector, np.diag(dense)])
    np.testing.assert_array_equal(slope, [300.0, 5.0, 0.0, 300.0, 50.0, 700.0])


def test_integers_become_floats():
    dense = np.array([[1, 0], [1, 1]])
    indices = jnp.array([[0, 0], [1, 0], [1, 1]])
    for dtype in ("bool", "int8", "uint32"):
        for matrix in (
            ss.csr_array(dense.astype(dtype)),
            jsparse.BCOO((jnp.asarray(np.ones(3, dtype)), indices), shape=(2, 2)),
        ):
            operator = SparseLinearOperator(matrix)
            assert operator.data.dtype == jnp.float64
            np.testing.assert_array_equal(_matrix(operator), dense)
    with jax.enable_x64(False):
        assert SparseLinearOperator(ss.csr_array(1.0 * dense)).data.dtype == jnp.float32


# --- products -------------------------------------------------------------------------------


@cache
def _views():
    """Of every structure both matrices, products by rows, and products, by one program."""
    rng, given = np.random.default_rng(3), {}
    for name, dense in STRUCTURES.items():
        m, n = dense.shape
        given[name] = _operator(dense), *(rng.standard_normal(size) for size in (n, m, (n, 5)))

    @eqx.filter_jit
    def run(given):
        return {
            name: (
                (operator.as_matrix(), operator.T.T.as_matrix()),
                jax.vmap(operator.mv)(block.T),
                (operator.mv(vector), operator.T.mv(other), _mm(operator, block)),
            )
            for name, (operator, vector, other, block) in given.items()
        }

    return given, jax.device_get(run(given))


@pytest.mark.parametrize("name", STRUCTURES)
def test_products(name):
    given, found = _views()
    dense, (operator, vector, other, block) = STRUCTURES[name], given[name]
    matrices, rows, (product, adjoint, columns) = found[name]
    for matrix in matrices:
        np.testing.assert_array_equal(matrix, dense)
    _assert_close(product, dense @ vector)
    _assert_close(adjoint, dense.T @ other)
    _assert_close(columns, dense @ block)
    _assert_close(rows, (dense @ block).T)
    # Padding is bounded.
    pattern, (m, n) = operator.pattern, dense.shape
    for layout, length in ((pattern.forward, m), (pattern.backward, n)):
        assert operator.nnz <= layout.slots.size <= _MAX_PADDING * (operator.nnz + length)


def test_half_precision_is_accumulated_in_float32():
    # 1 + 1 + ... stops at 256 when summed up in bfloat16.
    n = 8192
    operator = _operator(np.ones((1, n)), "bfloat16")
    ones = np.ones((n, 1), jnp.dtype("bfloat16"))
    np.testing.assert_array_equal(np.asarray(_mm(operator, ones)).astype("float64"), [[n]])


def test_nan_stays_in_its_rows():
    dense = STRUCTURES["empty_rows"]
    operator = _operator(dense)
    for bad in (np.nan, np.inf):
        vector = np.where(np.arange(60) == 17, bad, _numbers(60))
        product = np.asarray(_mm(operator, vector[:, None]))[:, 0]
        np.testing.assert_array_equal(~np.isfinite(product), dense[:, 17] != 0)
    arrow = STRUCTURES["arrow"].copy()
    arrow[5, 5] = np.nan
    product = np.asarray(_mm(_operator(arrow), np.ones((300, 1))))[:, 0]
    np.testing.assert_array_equal(np.isnan(product), np.arange(300) == 5)


# --- transformations ------------------------------------------------------------------------


def _dense_of(operator, data):
    """The dense matrix as a function of the entries, by the book."""
    rows, columns = np.asarray(operator.pattern.rows), np.asarray(operator.pattern.columns)
    return jnp.zeros(operator.pattern.shape, data.dtype).at[rows, columns].add(data)


# Complex entries take the same paths: one of them is enough.
@pytest.mark.parametrize(
    ("name", "dtype"), [("power_law", "float64"), ("no_entries", "float64"), ("tall", "complex128")]
)
def test_transformations(name, dtype):
    """Derivatives of products and diagonals, and batches, against those of the dense matrix."""
    m, n = STRUCTURES[name].shape
    operator = _operator(STRUCTURES[name])
    data, block = _numbers(operator.nnz, 5, dtype), _numbers((n, 3), 6, dtype)
    weights, change = _numbers((m, 3), 7, dtype), _numbers(operator.nnz, 8, dtype)
    moved, along = _numbers((n, 3), 9, dtype), _numbers(min(m, n), 10, dtype)

    def fast(data, block):
        return _mm(operator.with_data(data), block), lx.diagonal(operator.with_data(data))

    def slow(data, block):
        matrix = _dense_of(operator, data)
        return matrix @ block, jnp.diagonal(matrix)

    def views(program):
        def loss(data, block):
            product, diagonal = program(data, block)
            return jnp.sum(jnp.conj(weights) * product).real + jnp.sum(along * diagonal).real

        def slope(block):
            return jax.jvp(lambda d: loss(d, block) ** 2, (data,), (change,))[1]

        batch = jnp.stack([data, 2 * data, -data])
        return (
            jax.jvp(program, (data, block), (change, moved)),
            jax.grad(loss, (0, 1))(data, block),
            jax.grad(slope)(block),
            jax.vmap(program, in_axes=(0, None))(batch, block),
            jax.vmap(jax.grad(loss), in_axes=(0, None))(batch, block),
        )

    @jax.jit
    def run(data):
        at = operator.with_data(data)
        transpose = jax.linear_transpose(at.mv, block[:, 0])(weights[:, 0])[0]
        found = *views(fast), transpose
        expected = *views(slow), _mm(at.T, weights[:, :1])[:, 0]
        return found, expected

    found, expected = jax.device_get(run(data))
    for ours, theirs in zip(*map(jtu.tree_leaves, (found, expected)), strict=True):
        _assert_close(ours, theirs, theirs.dtype)


# --- lineax ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "dtype"), [(1, "float32"), (4, "complex64")])
def test_checks_agree_with_a_dense_operator(n, dtype):
    plain = _operator(np.eye(n), dtype)
    for tags in ((), *CHECKS, [lx.symmetric_tag, lx.unit_diagonal_tag]):
        ours = SparseLinearOperator(ss.csr_array(np.eye(n)), tags).with_data(plain.data)
        theirs = lx.MatrixLinearOperator(jnp.eye(n, dtype=dtype), tags)
        for check in CHECKS.values():
            assert check(ours) is check(theirs)
            assert check(ours.T) is check(theirs.T)
        assert (ours.T is ours) is (theirs.T is theirs)
        assert ours.T.tags == theirs.T.tags
    with pytest.raises(ValueError, match="matching input and output"):
        SparseLinearOperator(ss.csr_array((2, 3)), lx.symmetric_tag)


def test_conj_and_the_transpose_of_a_hermitian_matrix():
    factor = _dense(5, 5, 0.9, dtype="complex128")
    hermitian = factor @ factor.conj().T
    operator = _operator(hermitian, "complex128", lx.positive_semidefinite_tag)
    assert lx.linearise(operator) is lx.materialise(operator) is operator
    conjugate = lx.conj(operator)
    assert isinstance(conjugate, SparseLinearOperator)
    assert conjugate.tags == operator.tags
    _assert_close(_matrix(conjugate), hermitian.conj(), "complex128")
    vector = _numbers(5, dtype="complex128")
    _assert_close(operator.T.mv(vector), hermitian.T @ vector, "complex128")
