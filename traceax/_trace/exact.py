"""The exact trace as an estimator."""

from typing import ClassVar, final

import equinox as eqx

from .._estimators.estimator import AbstractTraceEstimator
from .._estimators.exact import exact, refuse_tolerance


@final
class ExactTraceEstimator(AbstractTraceEstimator):
    r"""The exact trace $\sum_j e_j^* A e_j$ from products with unit vectors; standard error 0.

    Parts whose diagonal is known (stored, diagonal, tridiagonal, identity, and sums and multiples
    of them) are read off without products. The budget `k` is ignored.

    Cost: `n` matvecs for the parts that are not known; one block of unit vectors and its products,
    of at most 2^27 numbers.
    """

    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 1

    def check(self, operator):
        """Any square operator will do."""

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        del key, k
        return exact(operator)

    def to_tolerance(self, key, operator, run):
        """There is nothing to stop early: refuse."""
        refuse_tolerance(
            "ExactTraceEstimator",
            "XTraceEstimator(), XNysTraceEstimator(), HutchPlusPlusEstimator() or "
            "HutchinsonEstimator()",
        )


ExactTraceEstimator.__init__.__doc__ = """**Arguments:**

- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers, or 64 vectors for operators that call functions. (A dense matrix is multiplied
    at once.)
"""
