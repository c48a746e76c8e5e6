"""The default estimator of traces."""

from typing import ClassVar, final

import equinox as eqx

from .._estimators.auto import choose, compute_split, split_to_tolerance
from .._estimators.estimator import AbstractTraceEstimator
from .hutchinson import HutchinsonEstimator
from .xnystrace import XNysTraceEstimator
from .xtrace import XTraceEstimator


@final
class AutoTraceEstimator(AbstractTraceEstimator):
    """Reads off what is known exactly, and chooses the best estimator for the rest.

    1. Stored parts (dense, sparse, diagonal, tridiagonal) and identity and unit-diagonal parts, of
       sums, multiples and negations, are read off exactly: `tr(K + s I)` spends its matvecs on
       `K` alone, and spends none if `K` is stored, too.
    2. What is left goes to [`traceax.HutchinsonEstimator`][] if a block of `n x k` numbers would
       exceed `memory_limit`,
    3. to [`traceax.XNysTraceEstimator`][] if it is tagged positive or negative semidefinite,
    4. and to [`traceax.XTraceEstimator`][] otherwise.

    Cost: at most `k` matvecs (0 if everything is known); the memory of the chosen estimator.
    """

    memory_limit: int = eqx.field(default=2**32, static=True)
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 1

    def check(self, operator):
        """Any square operator will do."""

    def select(self, operator, k: int):
        """The estimator for an operator without known parts, and for this budget."""
        return choose(
            operator,
            k,
            self.memory_limit,
            hutchinson=HutchinsonEstimator(batch_size=self.batch_size),
            nystrom=XNysTraceEstimator(),
            sketching=XTraceEstimator(),
        )

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""

        def estimate(key, parts, left):
            return self.select(parts.rest, left).compute(key, parts.rest, left)

        return compute_split(key, operator, k, estimate)

    def to_tolerance(self, key, operator, run):
        """See `AbstractTraceEstimator`."""
        return split_to_tolerance(self.select, key, operator, run)


AutoTraceEstimator.__init__.__doc__ = """**Arguments:**

- `memory_limit`: bytes that a block of `n x k` numbers may take (4 GiB by default) before
    Hutchinson's estimator, which needs no sketch, takes over.
- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers, or 64 vectors for operators that call functions. (A dense matrix is multiplied
    at once.)
"""
