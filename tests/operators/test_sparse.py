"""`SparseLinearOperator` against the dense matrix it stands for."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
import numpy as np
import pytest
import scipy.sparse as ss
from jax.experimental import sparse as jsparse

import traceax as tr
from traceax._operators.sparse import SparseLinearOperator
from traceax._operators.sparse_layout import _MAX_PADDING

from ..helpers import variant

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
FORMATS = ["csr", "csc", "coo", "bsr", "dia", "lil", "dok"]


def _dense(m, n, density=0.3, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((m, n))
    if np.dtype(dtype).kind == "c":
        matrix = matrix + 1j * rng.standard_normal((m, n))
    return np.where(rng.random((m, n)) < density, matrix, 0)


def _structures():
    """Name -> dense matrix: the shapes of sparsity that a layout could get wrong."""
    rng = np.random.default_rng(1)
    arrow = np.diag(np.arange(1.0, 301))
    arrow[0], arrow[:, 0] = 1.0 + np.arange(300), 2.0 - np.arange(300)
    lengths = np.minimum((rng.pareto(1.0, 99) * 2).astype(int), 99)
    power = np.zeros((99, 99))
    for i, length in enumerate(lengths):
        power[i, rng.choice(99, length, replace=False)] = rng.standard_normal(length)
    empty_rows = _dense(60, 60, 0.2)
    empty_rows[::2] = 0
    one_dense_row = np.eye(257)
    one_dense_row[100] = rng.standard_normal(257)
    all_wide = rng.standard_normal((7, 131))
    return {
        "uniform": _dense(20, 20),
        "tall": _dense(50, 20),
        "wide": _dense(20, 50),
        "dense": _dense(30, 30, 1.1),
        "all_wide": all_wide,
        "one_entry": _dense(1, 1, 1.1),
        "one_row": _dense(1, 90, 0.9),
        "one_column": _dense(90, 1, 0.9),
        "no_entries": np.zeros((5, 5)),
        "no_entries_1x1": np.zeros((1, 1)),
        "no_entries_wide": np.zeros((3, 8)),
        "last_rows_empty": np.diag([1.0, 2.0, 0.0, 0.0]),
        "empty_rows": empty_rows,
        "permutation": np.eye(30)[rng.permutation(30)],
        "arrow": arrow,
        "power_law": power,
        "one_dense_row": one_dense_row,
        "one_dense_column": one_dense_row.T,
    }


STRUCTURES = _structures()


def _operator(dense, dtype="float64", tags=()):
    operator = SparseLinearOperator(ss.csr_array(dense), tags)
    return operator.with_data(operator.data.astype(dtype))


def _tolerance(dtype):
    return 200 * float(jnp.finfo(dtype).eps)


def _assert_close(actual, expected, dtype="float64"):
    assert actual.dtype == jnp.dtype(dtype)
    wide = "complex128" if np.dtype(jnp.dtype(dtype)).kind == "c" else "float64"
    actual, expected = np.asarray(actual.astype(wide)), np.asarray(expected).astype(wide)
    assert actual.shape == expected.shape
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=_tolerance(dtype) * scale)


def _vector(n, seed=3, dtype="float64"):
    rng = np.random.default_rng(seed)
    vector = rng.standard_normal(n)
    if np.dtype(jnp.dtype(dtype)).kind == "c":
        vector = vector + 1j * rng.standard_normal(n)
    return jnp.asarray(vector).astype(dtype)


def _block(shape, seed=4, dtype="float64"):
    return _vector(shape[0] * shape[1], seed, dtype).reshape(shape)


def _bcoo(dense, dtype):
    """Of a dense matrix, without JAX's programs for that."""
    indices = np.argwhere(dense)
    data = jnp.asarray(dense[tuple(indices.T)]).astype(dtype)
    return jsparse.BCOO((data, jnp.asarray(indices)), shape=dense.shape)


def _mm(operator, block):
    return jax.vmap(operator.mv, in_axes=1, out_axes=1)(block)


# --- construction ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "kind"), [*((fmt, "array") for fmt in FORMATS), ("csr", "matrix"), ("coo", "matrix")]
)
def test_scipy_formats(fmt, kind):
    dense = _dense(12, 8)
    matrix = getattr(ss, f"{fmt}_{kind}")(dense)
    operator = SparseLinearOperator(matrix)
    np.testing.assert_array_equal(operator.as_matrix(), dense)
    vector = _vector(8)
    _assert_close(operator.mv(vector), dense @ vector)


@pytest.mark.parametrize("fmt", ["csr", "csc", "coo", "dia"])
def test_scipy_data_is_in_row_major_order(fmt):
    dense = _dense(9, 7)
    operator = SparseLinearOperator(ss.csr_array(dense).asformat(fmt))
    np.testing.assert_array_equal(operator.data[operator.data != 0], dense[dense != 0])


def test_scipy_duplicates_are_summed_and_the_matrix_is_left_alone():
    # One row with unsorted columns and a duplicate: a CSR matrix that is not canonical.
    csr = ss.csr_array(
        (np.array([1.0, 2.0, 4.0]), np.array([2, 0, 2]), np.array([0, 3, 3])), shape=(2, 3)
    )
    operator = SparseLinearOperator(csr)
    assert operator.nnz == 2
    np.testing.assert_array_equal(operator.data, [2.0, 5.0])
    np.testing.assert_array_equal(operator.as_matrix(), [[2.0, 0.0, 5.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(csr.data, [1.0, 2.0, 4.0])
    np.testing.assert_array_equal(csr.indices, [2, 0, 2])


def test_explicit_zeros_stay_entries():
    coo = ss.coo_array((np.array([0.0, 3.0]), (np.array([0, 1]), np.array([1, 1]))), shape=(2, 2))
    operator = SparseLinearOperator(coo)
    assert operator.nnz == 2
    gradient = jax.grad(lambda d: operator.with_data(d).mv(jnp.array([5.0, 7.0])).sum())
    np.testing.assert_array_equal(gradient(operator.data), [7.0, 7.0])


def test_scipy_buffers_longer_than_the_entries():
    csr = ss.csr_array(
        (np.array([1.0, 2.0, 99.0]), np.array([0, 1, 0]), np.array([0, 1, 2])), shape=(2, 2)
    )
    np.testing.assert_array_equal(SparseLinearOperator(csr).as_matrix(), np.diag([1.0, 2.0]))


@pytest.mark.parametrize("name", ["uniform", variant("empty_rows")])
@pytest.mark.parametrize("kind", ["BCOO", "BCSR"])
def test_jax_formats(kind, name):
    dense = STRUCTURES[name]
    matrix = getattr(jsparse, kind).fromdense(jnp.asarray(dense))
    operator = SparseLinearOperator(matrix)
    assert operator.data is matrix.data
    np.testing.assert_array_equal(operator.as_matrix(), dense)
    vector = _vector(dense.shape[1])
    _assert_close(operator.mv(vector), dense @ vector)


@pytest.mark.parametrize("anything", [100.0, np.nan])
@pytest.mark.parametrize("kind", ["BCOO", "BCSR"])
def test_padding_of_jax_formats_is_no_entry(kind, anything):
    dense = np.diag([1.0, 2.0, 3.0])
    matrix = getattr(jsparse, kind).fromdense(jnp.asarray(dense), nse=7)
    data = matrix.data.at[3:].set(anything)
    if kind == "BCOO":
        matrix = jsparse.BCOO((data, matrix.indices), shape=(3, 3))
    else:
        matrix = jsparse.BCSR((data, matrix.indices, matrix.indptr), shape=(3, 3))
    operator = SparseLinearOperator(matrix)
    assert operator.nnz == 7
    vector = jnp.array([1.0, 10.0, 100.0])
    for op in (operator, operator.T):
        np.testing.assert_array_equal(op.as_matrix(), dense)
        np.testing.assert_array_equal(op.mv(vector), dense @ vector)
        np.testing.assert_array_equal(lx.diagonal(op), [1.0, 2.0, 3.0])
        for side in lx.tridiagonal(op)[1:]:
            np.testing.assert_array_equal(side, [0.0, 0.0])
    gradient = jax.grad(lambda d: operator.with_data(d).mv(vector).sum())(operator.data)
    np.testing.assert_array_equal(gradient, [1.0, 10.0, 100.0, 0.0, 0.0, 0.0, 0.0])
    assert float(tr.trace(jr.key(0), operator, 2).value) == 6.0


def test_unsorted_bcoo_with_duplicates_keeps_its_order():
    indices = jnp.array([[2, 0], [0, 1], [2, 0], [1, 1], [2, 2]])
    data = jnp.array([1.0, 2.0, 4.0, 8.0, 16.0])
    operator = SparseLinearOperator(jsparse.BCOO((data, indices), shape=(3, 3)))
    dense = np.array([[0.0, 2.0, 0.0], [0.0, 8.0, 0.0], [5.0, 0.0, 16.0]])
    vector = jnp.array([3.0, 5.0, 7.0])
    np.testing.assert_array_equal(operator.as_matrix(), dense)
    np.testing.assert_array_equal(operator.mv(vector), dense @ vector)
    np.testing.assert_array_equal(operator.T.mv(vector), dense.T @ vector)
    np.testing.assert_array_equal(lx.diagonal(operator), np.diag(dense))

    weights = jnp.array([1.0, 10.0, 100.0])

    def loss(data):
        return weights @ SparseLinearOperator(jsparse.BCOO((data, indices), shape=(3, 3))).mv(
            vector
        )

    np.testing.assert_array_equal(jax.grad(loss)(data), [300.0, 5.0, 300.0, 50.0, 700.0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_is_kept(dtype):
    dense = _dense(6, 6, dtype=jnp.dtype(dtype))
    operator = SparseLinearOperator(_bcoo(dense, dtype))
    assert operator.data.dtype == jnp.dtype(dtype)
    assert operator.in_structure() == jax.ShapeDtypeStruct((6,), dtype)
    assert operator.mv(_vector(6, dtype=dtype)).dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint32"])
@pytest.mark.parametrize("kind", ["scipy", "jax"])
def test_integers_become_floats(kind, dtype):
    dense = np.array([[1, 0], [1, 1]]).astype(dtype)
    matrix = ss.csr_array(dense)
    if kind == "jax":
        indices = jnp.array([[0, 0], [1, 0], [1, 1]])
        matrix = jsparse.BCOO((jnp.ones(3, dtype), indices), shape=(2, 2))
    operator = SparseLinearOperator(matrix)
    assert operator.data.dtype == jnp.float64
    np.testing.assert_array_equal(operator.mv(jnp.array([2.0, 3.0])), [2.0, 5.0])


@pytest.mark.parametrize(
    ("wide", "kept"), [("longdouble", "float64"), ("clongdouble", "complex128")]
)
def test_extended_precision_is_rounded(wide, kept):
    operator = SparseLinearOperator(ss.csr_array(np.eye(2).astype(wide)))
    assert operator.data.dtype == jnp.dtype(kept)


def test_without_64_bits_float64_becomes_float32():
    with jax.enable_x64(False):
        operator = SparseLinearOperator(ss.csr_array(_dense(5, 5)))
        assert operator.data.dtype == jnp.float32
        assert operator.mv(jnp.ones(5)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("matrix", "hint"),
    [
        (np.eye(2), "lineax.MatrixLinearOperator"),
        (jnp.eye(2), "lineax.MatrixLinearOperator"),
        ([[1.0]], "lineax.MatrixLinearOperator"),
        (lambda x: x, "scipy.sparse.csr_array"),
        (ss.csr_array(np.eye(2)) @ np.eye(2), "lineax.MatrixLinearOperator"),
    ],
)
def test_only_sparse_matrices(matrix, hint):
    with pytest.raises(TypeError, match=hint):
        SparseLinearOperator(matrix)


def test_entries_must_be_numbers():
    matrix = ss.csr_array(np.eye(2))
    matrix.data = np.array([None, None], object)
    with pytest.raises(TypeError, match=r"must be numbers, got dtype object"):
        SparseLinearOperator(matrix)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (lambda: ss.coo_array(np.ones(3)), r"two-dimensional matrix, got shape \(3,\)"),
        (lambda: jsparse.BCOO.fromdense(jnp.ones(3)), r"two-dimensional matrix, got shape \(3,\)"),
        (lambda: jsparse.BCOO.fromdense(jnp.eye(2), n_batch=1), "n_batch=1"),
        (lambda: jsparse.BCOO.fromdense(jnp.eye(2), n_dense=1), "n_dense=1"),
        (lambda: jsparse.empty((2**31, 2)), "32 bits"),
        (
            lambda: jsparse.BCOO((jnp.ones(1), jnp.array([[-1, 0]])), shape=(2, 2)),
            "must not be negative",
        ),
    ],
)
def test_bad_matrices(matrix, message):
    with pytest.raises(ValueError, match=message):
        SparseLinearOperator(matrix())


def test_traced_indices():
    @jax.jit
    def product(matrix, vector):
        return SparseLinearOperator(matrix).mv(vector)

    with pytest.raises(ValueError, match="with_data"):
        product(jsparse.BCOO.fromdense(jnp.eye(2)), jnp.ones(2))
    with pytest.raises(ValueError, match="with_data"):
        product(jsparse.BCSR.fromdense(jnp.eye(2)), jnp.ones(2))


def test_symmetric_tags_need_a_square_matrix():
    with pytest.raises(ValueError, match="matching input and output"):
        SparseLinearOperator(ss.csr_array((2, 3)), lx.symmetric_tag)


def test_with_data():
    dense = _dense(8, 6)
    operator = _operator(dense, tags=lx.lower_triangular_tag)
    other = operator.with_data(2 * operator.data)
    assert other.tags == operator.tags
    assert other.nnz == operator.nnz == np.count_nonzero(dense)
    np.testing.assert_array_equal(other.as_matrix(), 2 * dense)
    np.testing.assert_array_equal(operator.as_matrix(), dense)
    for bad in (jnp.ones(operator.nnz + 1), jnp.ones((operator.nnz, 1)), jnp.ones(())):
        with pytest.raises(ValueError, match=f"there are {operator.nnz} places"):
            operator.with_data(bad)


# --- products -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "transposed"),
    [
        *((name, False) for name in STRUCTURES),
        *((name, True) for name in ("tall", "power_law")),
    ],
)
def test_products(name, transposed):
    """One program for all, as most of the time goes into compiling."""
    dense, operator = STRUCTURES[name], _operator(STRUCTURES[name])
    if transposed:
        dense, operator = dense.T, operator.T
    m, n = dense.shape
    assert operator.in_structure() == jax.ShapeDtypeStruct((n,), "float64")
    assert operator.out_structure() == jax.ShapeDtypeStruct((m,), "float64")
    rng = np.random.default_rng(3)
    vector, other, block = (rng.standard_normal(shape) for shape in (n, m, (n, 5)))

    @eqx.filter_jit
    def views(operator, vector, other, block):
        products = operator.mv(vector), operator.T.mv(other), _mm(operator, block)
        rows = jax.vmap(operator.mv)(block.T)
        return operator.as_matrix(), operator.T.T.as_matrix(), rows, products

    given = map(jnp.asarray, (vector, other, block))
    *matrices, rows, (product, adjoint, columns) = views(operator, *given)
    for matrix in matrices:
        np.testing.assert_array_equal(matrix, dense)
    _assert_close(product, dense @ vector)
    _assert_close(adjoint, dense.T @ other)
    _assert_close(columns, dense @ block)
    _assert_close(rows, (dense @ block).T)


@pytest.mark.parametrize("name", STRUCTURES)
def test_padding_is_bounded(name):
    dense, operator = STRUCTURES[name], _operator(STRUCTURES[name])
    for layout, rows in zip(
        (operator.pattern.forward, operator.pattern.backward), dense.shape, strict=True
    ):
        assert operator.nnz <= layout.num_slots <= _MAX_PADDING * (operator.nnz + rows)


def test_one_dense_row_costs_little():
    n = 20_000
    dense_row = ss.coo_array(
        (np.ones(n), (np.full(n, 7), np.arange(n, dtype=np.int64))), shape=(n, n)
    )
    operator = SparseLinearOperator(ss.eye_array(n).tocoo() + dense_row)
    for layout in (operator.pattern.forward, operator.pattern.backward):
        assert layout.num_slots <= 2 * (operator.nnz + n)
    vector = _vector(n)
    expected = np.asarray(vector).copy()
    expected[7] += np.sum(vector)
    _assert_close(operator.mv(vector), expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("uniform", dtype) for dtype in ("float16", "complex64")),
        *(("power_law", dtype) for dtype in ("bfloat16", "complex128")),
        *(variant("uniform", dtype) for dtype in DTYPES if dtype not in ("float16", "complex64")),
    ],
)
def test_products_in_every_dtype(name, dtype):
    if name == "uniform":
        dense = _dense(*STRUCTURES[name].shape, dtype=jnp.dtype(dtype))
    else:
        dense = STRUCTURES[name]
    operator = _operator(dense, dtype)
    rounded = np.asarray(operator.as_matrix().astype("complex128"))
    block = _block((dense.shape[1], 3), dtype=dtype)
    exact = rounded @ np.asarray(block.astype("complex128"))
    if jnp.dtype(dtype).kind != "c":
        exact = exact.real
    _assert_close(_mm(operator, block), exact, dtype)
    _assert_close(operator.mv(block[:, 0]), exact[:, 0], dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_accumulated_in_float32(dtype):
    # 1 + 1 + ... stops at 2048 (256) when summed up in half precision.
    n = 8192
    operator = SparseLinearOperator(ss.csr_array(np.ones((1, n))))
    operator = operator.with_data(operator.data.astype(dtype))
    np.testing.assert_array_equal(operator.mv(jnp.ones(n, dtype)).astype("float64"), [n])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_in_a_vector_stays_in_its_rows(bad):
    dense = STRUCTURES["empty_rows"]
    operator = _operator(dense)
    for column in (0, 17, 59):
        product = operator.mv(_vector(60).at[column].set(bad))
        np.testing.assert_array_equal(~np.isfinite(product), dense[:, column] != 0)


def test_nan_in_the_matrix_stays_in_its_row():
    dense = STRUCTURES["arrow"].copy()
    dense[5, 5] = np.nan
    product = _operator(dense).mv(jnp.ones(300))
    np.testing.assert_array_equal(np.isnan(product), np.arange(300) == 5)


def test_wrong_vectors():
    operator = _operator(_dense(4, 3))
    for shape in ((4,), (3, 2), ()):
        with pytest.raises(ValueError, match=r"multiplies vectors of shape \(3,\)"):
            operator.mv(jnp.ones(shape))


def test_dtypes_are_not_promoted_silently():
    operator = _operator(_dense(4, 3), "float32")
    with pytest.raises(ValueError, match="no available implicit dtype promotion"):
        operator.mv(jnp.ones(3, "float64"))
    with jax.numpy_dtype_promotion("standard"):
        assert operator.mv(jnp.ones(3, "float64")).dtype == jnp.float64


# --- transformations ------------------------------------------------------------------------

# Complex entries take the same paths: one of them is enough.
AD_CASES = [
    *((name, "float64") for name in ("power_law", "no_entries")),
    ("tall", "complex128"),
]


def _dense_of(operator, data):
    """The dense matrix as a function of the entries, by the book."""
    rows, columns = np.asarray(operator.pattern.rows), np.asarray(operator.pattern.columns)
    return jnp.zeros(operator.pattern.shape, data.dtype).at[rows, columns].add(data)


def _assert_same(actual, expected):
    _assert_close(actual, expected, expected.dtype)


@pytest.mark.parametrize(("name", "dtype"), AD_CASES)
class TestDerivatives:
    def case(self, name, dtype):
        shape = STRUCTURES[name].shape
        operator = _operator(STRUCTURES[name])
        data = _vector(operator.nnz, 5, dtype)
        operator = operator.with_data(data)
        return operator, data, _block((shape[1], 3), 6, dtype), _block((shape[0], 3), 7, dtype)

    def losses(self, operator, weights):
        def fast(data, block):
            return jnp.sum(jnp.conj(weights) * _mm(operator.with_data(data), block)).real

        def slow(data, block):
            return jnp.sum(jnp.conj(weights) * (_dense_of(operator, data) @ block)).real

        return fast, slow

    def test_grad(self, name, dtype):
        operator, data, block, weights = self.case(name, dtype)
        fast, slow = self.losses(operator, weights)
        expected = jax.jit(jax.grad(slow, (0, 1)))(data, block)
        for actual in (
            jax.jit(jax.grad(fast, (0, 1)))(data, block),
            (eqx.filter_grad(fast)(data, block), jax.grad(fast, 1)(data, block)),
        ):
            _assert_same(actual[0], expected[0])
            _assert_same(actual[1], expected[1])

    def test_jvp(self, name, dtype):
        operator, data, block, _ = self.case(name, dtype)
        tangents = _vector(operator.nnz, 8, dtype), _block(block.shape, 9, dtype)

        @jax.jit
        def both(primals, tangents):
            return (
                jax.jvp(lambda d, x: _mm(operator.with_data(d), x), primals, tangents),
                jax.jvp(lambda d, x: _dense_of(operator, d) @ x, primals, tangents),
            )

        actual, dense = both((data, block), tangents)
        _assert_same(actual[0], dense[0])
        _assert_same(actual[1], dense[1])

    def test_second_derivative(self, name, dtype):
        operator, data, block, weights = self.case(name, dtype)
        fast, slow = self.losses(operator, weights)
        direction = _vector(operator.nnz, 8, dtype)

        def second(loss):
            def along(x):
                return jax.jvp(lambda d: loss(d, x) ** 2, (data,), (direction,))[1]

            return jax.jit(jax.grad(along))(block)

        _assert_same(second(fast), second(slow))

    def test_linear_transpose(self, name, dtype):
        operator, _, block, weights = self.case(name, dtype)
        (actual,) = jax.linear_transpose(operator.mv, block[:, 0])(weights[:, 0])
        _assert_same(actual, operator.T.mv(weights[:, 0]))
        _assert_same(actual, operator.as_matrix().T @ weights[:, 0])

    def test_vmap(self, name, dtype):
        operator, data, block, weights = self.case(name, dtype)
        datas = jnp.stack([data, 2 * data, -data])
        both = jax.vmap(lambda d, x: operator.with_data(d).mv(x), in_axes=(0, 1), out_axes=1)
        product = np.asarray(operator.as_matrix()) @ np.asarray(block)
        _assert_same(jax.jit(both)(datas, block), product * np.array([1, 2, -1]))
        only_data = jax.vmap(lambda d: operator.with_data(d).mv(block[:, 0]))
        _assert_same(jax.jit(only_data)(datas)[1], 2 * product[:, 0])
        fast, slow = (
            jax.jit(jax.vmap(jax.grad(loss), in_axes=(0, None)))(datas, block)
            for loss in self.losses(operator, weights)
        )
        _assert_same(fast, slow)

    def test_diagonals(self, name, dtype):
        operator, data, _, _ = self.case(name, dtype)
        dense = np.asarray(operator.as_matrix())
        _assert_same(lx.diagonal(operator), np.diagonal(dense))
        offsets = (0, -1, 1)
        for actual, offset in zip(eqx.filter_jit(lx.tridiagonal)(operator), offsets, strict=True):
            _assert_same(actual, np.diagonal(dense, offset))
        weights = _vector(min(dense.shape), 10, dtype)
        slopes = (
            jax.grad(lambda d: (weights @ lx.diagonal(operator.with_data(d))).real),
            jax.grad(lambda d: (weights @ jnp.diagonal(_dense_of(operator, d))).real),
        )
        _assert_same(*(jax.jit(slope)(data) for slope in slopes))

    def test_tangent_operator(self, name, dtype):
        operator, _, block, _ = self.case(name, dtype)
        change = _vector(operator.nnz, 8, dtype)
        tangent = eqx.tree_at(
            lambda op: op.data, eqx.filter(operator, False), change, is_leaf=lambda x: x is None
        )
        tangent_operator = lx.TangentLinearOperator(operator, tangent)

        @eqx.filter_jit
        def views(operator, block, dense):
            return _mm(operator, block), operator.as_matrix(), _mm(operator.T, dense)

        given = operator.with_data(change).as_matrix()
        product, matrix, transposed = views(tangent_operator, block, given)
        dense = np.asarray(given)
        _assert_same(product, dense @ np.asarray(block))
        _assert_same(matrix, dense)
        _assert_same(transposed, dense.T @ dense)


def test_filter_grad_of_the_operator_itself():
    operator, block = _operator(STRUCTURES["uniform"]), _block((20, 3))
    gradient = eqx.filter_grad(lambda op: jnp.sum(_mm(op, block) ** 2))(operator)
    residual = 2 * operator.as_matrix() @ block @ block.T
    rows, columns = operator.pattern.rows, operator.pattern.columns
    _assert_same(gradient.data, residual[rows, columns])
    assert gradient.pattern.rows is None


def test_operator_as_an_argument_of_jit_and_scan():
    operator, vector = _operator(STRUCTURES["power_law"]), _vector(99)

    @eqx.filter_jit
    def squared(op, x):
        return jax.lax.scan(lambda y, _: (op.mv(y), None), x, length=2)[0]

    dense = STRUCTURES["power_law"]
    _assert_close(squared(operator, vector), dense @ (dense @ vector))
    assert eqx.filter_eval_shape(squared, operator, vector).shape == (99,)


def test_jit_of_construction_from_traced_data():
    matrix = jsparse.BCOO.fromdense(jnp.asarray(_dense(6, 6)))

    @jax.jit
    def product(data, vector):
        return SparseLinearOperator(jsparse.BCOO((data, matrix.indices), shape=(6, 6))).mv(vector)

    vector = _vector(6)
    _assert_close(product(3 * matrix.data, vector), 3 * _dense(6, 6) @ vector)


def test_pytree_round_trip():
    operator = _operator(STRUCTURES["arrow"], tags=lx.symmetric_tag)
    leaves, treedef = jtu.tree_flatten(operator)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    again = jtu.tree_unflatten(treedef, leaves)
    assert bool(eqx.tree_equal(operator, again))
    mapped = jtu.tree_map(lambda x: x, operator)
    np.testing.assert_array_equal(mapped.as_matrix(), operator.as_matrix())
    inexact, rest = eqx.partition(operator, eqx.is_inexact_array)
    assert [leaf.shape for leaf in jtu.tree_leaves(inexact)] == [(operator.nnz,)]
    np.testing.assert_array_equal(eqx.combine(inexact, rest).as_matrix(), operator.as_matrix())


def test_vmap_over_an_ensemble_of_operators():
    operator = _operator(STRUCTURES["uniform"])
    datas = jnp.stack([operator.data, 3 * operator.data])
    ensemble = eqx.filter_vmap(operator.with_data, out_axes=eqx.if_array(0))(datas)
    axes = jtu.tree_map(lambda _: None, ensemble)
    axes = eqx.tree_at(lambda op: op.data, axes, 0, is_leaf=lambda x: x is None)
    ensemble = eqx.tree_at(lambda op: op.pattern, ensemble, operator.pattern)
    vector = _vector(20)
    products = eqx.filter_vmap(lambda op: op.mv(vector), in_axes=(axes,))(ensemble)
    _assert_close(products, np.outer([1, 3], STRUCTURES["uniform"] @ vector))


# --- lineax ---------------------------------------------------------------------------------

TAGS = {
    lx.symmetric_tag: lx.is_symmetric,
    lx.diagonal_tag: lx.is_diagonal,
    lx.tridiagonal_tag: lx.is_tridiagonal,
    lx.unit_diagonal_tag: lx.has_unit_diagonal,
    lx.lower_triangular_tag: lx.is_lower_triangular,
    lx.upper_triangular_tag: lx.is_upper_triangular,
    lx.positive_semidefinite_tag: lx.is_positive_semidefinite,
    lx.negative_semidefinite_tag: lx.is_negative_semidefinite,
}


@pytest.mark.parametrize(("n", "dtype"), [(1, "float32"), (4, "complex64")])
@pytest.mark.parametrize("tag", [None, *TAGS], ids=str)
def test_checks_agree_with_a_dense_operator(tag, n, dtype):
    tags = () if tag is None else tag
    dense = np.eye(n)
    ours = SparseLinearOperator(_bcoo(dense, dtype), tags)
    theirs = lx.MatrixLinearOperator(jnp.asarray(dense, dtype), tags)
    for check in TAGS.values():
        assert check(ours) is check(theirs)
        assert check(ours.T) is check(theirs.T)
    assert (ours.T is ours) is (theirs.T is theirs)
    assert ours.T.tags == theirs.T.tags


def test_several_tags():
    tags = frozenset([lx.symmetric_tag, lx.unit_diagonal_tag])
    for given in (tags, list(tags), tuple(tags)):
        operator = _operator(np.eye(3), tags=given)
        assert operator.tags == tags
    assert _operator(np.eye(3), tags=lx.symmetric_tag).tags == frozenset([lx.symmetric_tag])


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_conj(dtype):
    operator = _operator(_dense(6, 4, dtype=dtype), dtype, lx.lower_triangular_tag)
    conjugate = lx.conj(operator)
    assert isinstance(conjugate, SparseLinearOperator)
    assert conjugate.tags == operator.tags
    np.testing.assert_array_equal(conjugate.as_matrix(), operator.as_matrix().conj())
    np.testing.assert_array_equal(lx.conj(operator.T).as_matrix(), operator.as_matrix().conj().T)


def test_hermitian_is_not_its_own_transpose():
    factor = _dense(5, 5, 0.9, dtype="complex128")
    hermitian = factor @ factor.conj().T
    operator = _operator(hermitian, "complex128", lx.positive_semidefinite_tag)
    _assert_close(operator.T.as_matrix(), hermitian.T, "complex128")
    vector = _vector(5, dtype="complex128")
    _assert_close(operator.T.mv(vector), hermitian.T @ vector, "complex128")


def test_linearise_and_materialise():
    dense = np.diag(np.arange(1.0, 6)) + np.diag(np.ones(4), 1) + np.diag(np.full(4, 2.0), -1)
    operator = _operator(dense)
    assert lx.linearise(operator) is operator
    assert lx.materialise(operator) is operator
    tridiagonal = lx.materialise(_operator(dense, tags=lx.tridiagonal_tag))
    assert isinstance(tridiagonal, lx.TridiagonalLinearOperator)
    np.testing.assert_array_equal(tridiagonal.as_matrix(), dense)
    diagonal = lx.materialise(_operator(np.diag([1.0, 2.0]), tags=lx.diagonal_tag))
    assert isinstance(diagonal, lx.DiagonalLinearOperator)
    np.testing.assert_array_equal(diagonal.as_matrix(), np.diag([1.0, 2.0]))


def test_composition_with_other_operators():
    dense, vector = _dense(6, 6), _vector(6)
    operator, identity = (
        _operator(dense),
        lx.IdentityLinearOperator(jax.ShapeDtypeStruct((6,), "float64")),
    )
    combined = (operator @ operator.T + 2.0 * identity - operator) / 4.0
    expected = (dense @ dense.T + 2 * np.eye(6) - dense) / 4
    _assert_close(combined.mv(vector), expected @ vector)
    _assert_close(combined.as_matrix(), expected)
    _assert_close(lx.diagonal(combined), np.diag(expected))


def _spd(n=60):
    factor = _dense(n, n, 0.1)
    return factor @ factor.T + n * np.eye(n)


@pytest.mark.parametrize(
    "solver",
    [
        lx.CG(rtol=1e-12, atol=1e-12),
        lx.GMRES(rtol=1e-12, atol=1e-12),
        lx.Cholesky(),
        lx.AutoLinearSolver(well_posed=True),
    ],
    ids=lambda s: type(s).__name__,
)
def test_linear_solve(solver):
    matrix, vector = _spd(), _vector(60)
    operator = _operator(matrix, tags=lx.positive_semidefinite_tag)
    solution = lx.linear_solve(operator, vector, solver).value
    np.testing.assert_allclose(solution, np.linalg.solve(matrix, vector), rtol=1e-9)


def test_linear_solve_of_a_matrix_that_is_not_symmetric():
    matrix, vector = _dense(30, 30, 0.2) + 10 * np.eye(30), _vector(30)
    solver = lx.BiCGStab(rtol=1e-12, atol=1e-12)
    solution = lx.linear_solve(_operator(matrix), vector, solver).value
    np.testing.assert_allclose(solution, np.linalg.solve(matrix, vector), rtol=1e-8)


def test_derivative_of_a_linear_solve():
    matrix, vector = _spd(20), _vector(20)
    operator = _operator(matrix, tags=lx.positive_semidefinite_tag)
    solver = lx.CG(rtol=1e-13, atol=1e-13)

    def fast(data, b):
        return jnp.sum(lx.linear_solve(operator.with_data(data), b, solver).value ** 3)

    def slow(data, b):
        return jnp.sum(jnp.linalg.solve(_dense_of(operator, data), b) ** 3)

    for argnum in (0, 1):
        actual, expected = (
            jax.jit(jax.grad(function, argnum))(operator.data, vector) for function in (fast, slow)
        )
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-12)


def test_importing_does_not_import_sparse_libraries():
    # jax.experimental.sparse takes a while, and is only needed by those who use it.
    import subprocess
    import sys

    code = (
        "import sys, traceax._operators.sparse\n"
        "assert 'jax.experimental.sparse' not in sys.modules\n"
        "assert 'scipy.io' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
