"""Numbers of things that a user gives."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._core.counts import checked_count

from ..helpers import PSD

KEY, N, TWO = jax.random.key(0), 12, np.int64(2)
MATRIX = jnp.diag(jnp.arange(1.0, N + 1))
OPERATOR = lx.MatrixLinearOperator(MATRIX, PSD)


def rbf(x, y):
    return jnp.exp(-jnp.sum((x - y) ** 2))


@pytest.mark.parametrize("value", [3, np.int32(3), np.array(3)])
def test_any_integer_is_a_count(value):
    count = checked_count(value, "rank")
    assert type(count) is int
    assert count == 3


@pytest.mark.parametrize("value", [True, np.True_, 3.0, "3", 0, -1, None])
def test_anything_else_is_not(value):
    with pytest.raises(ValueError, match="rank must be an int of at least 1, got"):
        checked_count(value, "rank")


def test_none_where_it_stands_for_something():
    assert checked_count(None, "rank", none="it is chosen") is None
    with pytest.raises(ValueError, match=r"at least 2, or None \(it is chosen\), got 1"):
        checked_count(1, "rank", 2, none="it is chosen")


@pytest.mark.parametrize(
    "call",
    [
        lambda two: tr.eigenpairs(KEY, OPERATOR, 8, num=two).values,
        lambda two: (
            tr.logdet(
                KEY, OPERATOR, 8, preconditioner=tr.NystromPreconditioner(rank=two), fallback=None
            ).value
        ),
        lambda two: tr.KernelLinearOperator(rbf, MATRIX, block_size=two).mv(MATRIX[0]),
    ],
)
def test_numpy_integers_are_taken_for_what_they_are(call):
    np.testing.assert_array_equal(call(TWO), call(2))
