"""The exact diagonal as an estimator."""

from typing import ClassVar, final

import equinox as eqx

from .._estimators.estimator import AbstractDiagonalEstimator
from .._estimators.exact import exact, refuse_tolerance


@final
class ExactDiagonalEstimator(AbstractDiagonalEstimator):
    """The exact diagonal from products with unit vectors; standard error 0.

    Parts whose diagonal is known (diagonal, tridiagonal, identity, and sums and multiples of
    them) are read off without products. The budget `k` is ignored.

    Cost: `n` matvecs for the parts that are not known; one block of unit vectors and its products,
    of at most 2^27 numbers.
    """

    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 1

    def check(self, operator):
        """Any square operator will do."""

    def compute_rows(self, key, operator, k, rows):
        """See `AbstractDiagonalEstimator`."""
        del key, k
        return exact(operator, rows)

    def to_tolerance(self, key, operator, run):
        """There is nothing to stop early: refuse."""
        refuse_tolerance(
            "ExactDiagonalEstimator",
            "XDiagEstimator(), XNysDiagEstimator(), DiagPlusPlusEstimator() or "
            "HutchinsonDiagonalEstimator()",
        )


ExactDiagonalEstimator.__init__.__doc__ = """**Arguments:**

- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers, or 64 vectors for operators that call functions. (A dense matrix is multiplied
    at once.)
"""
