"""What the estimators that make a sketch have in common: the probes and the samples of a trace."""

from collections.abc import Callable
from functools import partial

import numpy as np
from equinox import AbstractVar
from jaxtyping import Array, Inexact

from .._operators.block_operator import BlockOperator
from .._operators.tags import is_hermitian
from .._probes.samplers import AbstractSampler, SphereSampler, random_signs
from .._sketch.leave_one_out import (
    LeaveOneOut,
    RangeFinder,
    Samples,
    published_samples,
    xtrace_weights,
)
from .._sketch.shrunk import plain_samples, shrunk_samples, shrunk_weights, skew_samples
from .._sketch.weights import LowRankWeights
from .estimator import AbstractTraceEstimator
from .tolerance import RangeSampling


class AbstractSketchEstimator(AbstractTraceEstimator):
    """An estimator with a sketch, whose residual probes may be renormalised ("resphered")."""

    sampler: AbstractVar[AbstractSampler | None]
    improved: AbstractVar[bool | None]

    def __check_init__(self):
        self.residual_sampler.check_resphering(self.improved)

    def check(self, operator):
        """Any square operator will do."""
        self.residual_sampler.check_dtype(BlockOperator(operator).dtype, self.improved)

    @property
    def residual_sampler(self) -> AbstractSampler:
        """The distribution of probes whose residuals may be renormalised."""
        return self.sampler or SphereSampler()

    def sampling(self, operator, rows):
        """See `AbstractTraceEstimator`."""
        sampler = self.sampler_of_rows(BlockOperator(operator).dtype)
        return RangeSampling(rows=rows, sampler=sampler)

    def sampler_of_rows(self, dtype: np.dtype) -> AbstractSampler:
        """The distribution of the probes for a diagonal: independent entries of modulus 1."""
        return self.sampler or random_signs(dtype)

    def respheres(self, dtype: np.dtype) -> bool:
        """Whether the residual probes of a trace are renormalised."""
        return self.residual_sampler.respheres(self.improved, dtype)


class AbstractLeaveOneOutEstimator(AbstractSketchEstimator):
    """An estimator whose samples may be shrunk towards Hutchinson's."""

    shrink: AbstractVar[bool]

    def __check_init__(self):
        if not self.shrink:
            return
        if self.improved:
            raise ValueError(
                "shrink=True does not resphere, so that improved=True has no meaning. Leave out "
                "one of them."
            )
        if self.sampler is not None and self.sampler.rotation_invariant:
            raise ValueError(
                f"shrink=True needs probes with independent entries of modulus 1, and those of "
                f"{type(self.sampler).__name__} are not. Leave the sampler out, or use "
                "RademacherSampler()."
            )

    def sampler_of_trace(self, dtype: np.dtype) -> AbstractSampler:
        """The distribution of the probes for a trace."""
        return self.sampler_of_rows(dtype) if self.shrink else self.residual_sampler

    def samples_of(
        self, block: BlockOperator, terms: Inexact[Array, "n m"]
    ) -> Callable[[LeaveOneOut], Samples]:
        """The function that makes samples; `terms` are conj(omega) o A omega."""
        if not self.shrink:
            return partial(published_samples, n=block.n, resphere=self.respheres(block.dtype))
        plain = plain_samples if is_hermitian(block.operator) else skew_samples
        return partial(shrunk_samples, plain=plain(terms), n=block.n)

    def weights_of(self, omega: Array, factors: RangeFinder, beta: Array) -> LowRankWeights:
        """The weights of a trace, with those of the samples."""
        if self.shrink:
            return shrunk_weights(omega, factors, beta)
        return xtrace_weights(omega, factors, self.respheres(omega.dtype))
