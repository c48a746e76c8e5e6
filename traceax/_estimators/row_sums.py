"""Traces of the diagonal blocks that belong to the leaves of a PyTree."""

from typing import final

from .._sketch.weights import AbstractWeights
from .estimator import AbstractDiagonalEstimator, AbstractEstimator
from .exact import exact
from .rows import Rows


@final
class RowWeights(AbstractWeights):
    """Sums of entries of a differentiated diagonal."""

    inner: AbstractWeights
    rows: Rows

    def contract(self, operator):
        """See `AbstractWeights`."""
        diagonal = self.inner.contract(operator)
        if isinstance(diagonal, list):
            (sums,) = self.rows.by_leaf([part[:, None] for part in diagonal])
            return sums[:, 0]
        return self.rows.of_vector(diagonal)


@final
class BlockTraceEstimator(AbstractEstimator):
    """Sums of entries of what a diagonal estimator estimates, each with its own standard error."""

    inner: AbstractDiagonalEstimator
    rows: Rows

    @property
    def smallest(self):  # pyright: ignore
        """That of the estimator."""
        return self.inner.smallest

    @property
    def label(self):
        """That of the estimator."""
        return self.inner.label

    @property
    def batch_size(self):
        """That of the estimator."""
        return self.inner.batch_size

    def check(self, operator):
        """As the diagonal estimator."""
        self.inner.check(operator)

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        estimate, weights = self.inner.compute_rows(key, operator, k, self.rows)
        return estimate, RowWeights(weights, self.rows)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        estimate, weights = exact(operator, self.rows)
        return estimate, RowWeights(weights, self.rows)
