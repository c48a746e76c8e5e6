"""The default estimator of diagonals."""

from typing import ClassVar, final

import equinox as eqx

from .._estimators.auto import choose, compute_split, split_to_tolerance
from .._estimators.estimator import AbstractDiagonalEstimator
from .hutchinson import HutchinsonDiagonalEstimator
from .xdiag import XDiagEstimator
from .xnysdiag import XNysDiagEstimator


@final
class AutoDiagonalEstimator(AbstractDiagonalEstimator):
    """Chooses as [`traceax.AutoTraceEstimator`][] does: known parts are read off; what is left goes
    to [`traceax.HutchinsonDiagonalEstimator`][] if a block of `n x k` numbers would exceed
    `memory_limit`, to [`traceax.XNysDiagEstimator`][] if it is tagged semidefinite, and to
    [`traceax.XDiagEstimator`][] otherwise.

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
            hutchinson=HutchinsonDiagonalEstimator(batch_size=self.batch_size),
            nystrom=XNysDiagEstimator(),
            sketching=XDiagEstimator(),
        )

    def compute_rows(self, key, operator, k, rows):
        """See `AbstractDiagonalEstimator`."""

        def estimate(key, parts, left):
            return self.select(parts.rest, left).compute_rows(key, parts.rest, left, rows)

        return compute_split(key, operator, k, estimate, rows)

    def to_tolerance(self, key, operator, run):
        """See `AbstractTraceEstimator`."""
        return split_to_tolerance(self.select, key, operator, run)


AutoDiagonalEstimator.__init__.__doc__ = """**Arguments:**

- `memory_limit`: bytes that a block of `n x k` numbers may take (4 GiB by default) before
    Hutchinson's estimator, which needs no sketch, takes over.
- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers, or 64 vectors for operators that call functions. (A dense matrix is multiplied
    at once.)
"""
