"""Traces of the diagonal blocks that belong to the leaves of a PyTree."""

from typing import final

from .._sketch.weights import AbstractWeights
from .estimator import AbstractDiagonalEstimator, AbstractEstimator
from .exact import exact
from .rows import Rows


@final
class RowWeights(AbstractWeights):
    """The weights of sums of entries: `contract` adds up entries of a contracted diagonal."""

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
    """Sums of entries of an estimated diagonal, each sum with its own standard error."""

    inner: AbstractDiagonalEstimator
    rows: Rows

    @property
    def smallest(self):  # pyright: ignore
        """The smallest budget of the diagonal estimator."""
        return self.inner.smallest

    @property
    def label(self):
        """The name of the diagonal estimator."""
        return self.inner.label

    @property
    def batch_size(self):
        """The `batch_size` of the diagonal estimator."""
        return self.inner.batch_size

    def check(self, operator):
        """Check the operator as the diagonal estimator does."""
        self.inner.check(operator)

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        estimate, weights = self.inner.compute_rows(key, operator, k, self.rows)
        return estimate, RowWeights(weights, self.rows)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        estimate, weights = exact(operator, self.rows)
        return estimate, RowWeights(weights, self.rows)
