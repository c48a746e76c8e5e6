"""The default estimator, and exact values as an estimator."""

import dataclasses
from typing import final

import equinox as eqx
import lineax as lx

from .._operators.block_operator import BlockOperator
from .._operators.tags import semidefinite_sign
from .estimator import AbstractTraceEstimator
from .exact import exact, with_known_parts
from .hutchinson import HutchinsonEstimator
from .xnystrace import XNysTraceEstimator
from .xtrace import XTraceEstimator


@final
class AutoTraceEstimator(AbstractTraceEstimator):
    """Reads known parts exactly, and chooses an estimator for the rest.

    1. Stored parts (dense, sparse, diagonal, tridiagonal), identities and unit diagonals are read,
       in sums, multiples and negations too: `tr(K + s I)` spends its matvecs on `K` alone, and none
       if `K` is stored.
    2. The rest goes to [`traceax.HutchinsonEstimator`][] if a block of `n x k` numbers exceeds
       `memory_limit`,
    3. to [`traceax.XNysTraceEstimator`][] if it is tagged positive or negative semidefinite,
    4. and to [`traceax.XTraceEstimator`][] otherwise.

    Cost: at most `k` matvecs (0 if everything is known); the memory of the chosen estimator.
    """

    memory_limit: int = eqx.field(default=2**32, static=True)
    batch_size: int | None = eqx.field(default=None, static=True)

    def select(self, operator: lx.AbstractLinearOperator, k: int) -> AbstractTraceEstimator:
        """The estimator for an operator without known parts, and for this budget."""
        block = BlockOperator(operator)
        fits = block.n * k * block.dtype.itemsize <= self.memory_limit
        kind = XNysTraceEstimator if semidefinite_sign(operator) != 0 else XTraceEstimator
        estimator = kind(batch_size=self.batch_size, shrink=True)
        if fits and k >= estimator.smallest:
            return estimator
        return HutchinsonEstimator(batch_size=self.batch_size)

    def sampling(self, operator, rows):
        """The memory limit bounds what is prepared, and not the largest budget."""
        estimator = XTraceEstimator() if semidefinite_sign(operator) == 0 else XNysTraceEstimator()
        sampling = estimator.sampling(operator, rows)
        assert sampling is not None
        block = BlockOperator(operator)
        bytes_of_column = block.n * block.dtype.itemsize
        sizes = [size for size in sampling.sizes if size * bytes_of_column <= self.memory_limit]
        return dataclasses.replace(sampling, sizes=tuple(sizes))

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""

        def compute(rest, *_):
            return self.select(rest, k).compute(key, rest, k, weights)

        return with_known_parts(operator, None, compute)

    def compute_rows(self, key, operator, k, rows, weights):
        """See `AbstractTraceEstimator`."""

        def compute(rest, *_):
            return self.select(rest, k).compute_rows(key, rest, k, rows, weights)

        return with_known_parts(operator, rows, compute)


AutoTraceEstimator.__init__.__doc__ = """**Arguments:**

- `memory_limit`: bytes that a block of `n x k` numbers may take (4 GiB by default) before
    Hutchinson's estimator, which needs no sketch, takes over.
- `batch_size`: as of [`traceax.XTraceEstimator`][].
"""


@final
class ExactTraceEstimator(AbstractTraceEstimator):
    r"""The exact trace $\sum_j e_j^* A e_j$, or diagonal, from products with unit vectors; the
    standard error is 0.

    Known parts (stored, diagonal, tridiagonal, identity, and sums and multiples of these) take no
    products. The budget `k` is ignored.

    Cost: `n` matvecs for the rest; a block of unit vectors and its products, at most 2^27 numbers.
    """

    batch_size: int | None = eqx.field(default=None, static=True)

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        return self.exact(operator)

    def compute_rows(self, key, operator, k, rows, weights):
        """See `AbstractTraceEstimator`."""
        return exact(BlockOperator(operator, self.batch_size), rows)


ExactTraceEstimator.__init__.__doc__ = """**Arguments:**

- `batch_size`: as of [`traceax.XTraceEstimator`][].
"""
