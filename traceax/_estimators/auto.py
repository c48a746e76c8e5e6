"""The default estimator."""

from typing import final

import equinox as eqx
import lineax as lx

from .._operators.block_operator import BlockOperator
from .._operators.tags import semidefinite_sign
from .._probes.samplers import random_signs
from .estimator import AbstractTraceEstimator
from .exact import with_known_parts
from .hutchinson import HutchinsonEstimator
from .tolerance import SIZES, RangeSampling
from .xtrace import XNysTraceEstimator, XTraceEstimator


@final
class AutoTraceEstimator(AbstractTraceEstimator):
    """Reads known parts exactly, and chooses an estimator for the rest.

    Stored parts (dense, sparse, diagonal, tridiagonal), identities and unit diagonals are read, in
    sums, multiples and negations too: `tr(K + s I)` spends its matvecs on `K` alone. The rest goes
    to [`traceax.XNysTraceEstimator`][] if it is tagged semidefinite, else to
    [`traceax.XTraceEstimator`][], both with `shrink=True`; and to [`traceax.HutchinsonEstimator`][]
    if a block of `n x k` numbers exceeds `memory_limit`, or for fewer than three probes.

    **Cost:** at most `k` matvecs (0 if everything is known); the memory of the chosen estimator.

    **Arguments:**

    - `memory_limit`: bytes that a block of `n x k` numbers may take (4 GiB by default) before
        Hutchinson's estimator, which needs no sketch, takes over.
    - `batch_size`: as of [`traceax.XTraceEstimator`][].
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
        block = BlockOperator(operator)
        columns = self.memory_limit // (block.n * block.dtype.itemsize)
        sizes = tuple(size for size in SIZES if size <= columns)
        return RangeSampling(rows=rows, sampler=random_signs(block.dtype), sizes=sizes)

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
