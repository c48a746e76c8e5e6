"""What the estimators that make a sketch have in common: which probes they draw."""

import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar

from .._operators.block_operator import BlockOperator
from .._probes.samplers import AbstractSampler, RademacherSampler, SphereSampler, SteinhausSampler
from .estimator import AbstractTraceEstimator
from .rows import Rows
from .samples import AbstractSampling, RangeSampling


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

    def sampler_of_samples(self, rows: Rows | None, dtype: np.dtype) -> AbstractSampler:
        """The distribution of the probes of a call with a tolerance."""
        return self.residual_sampler if rows is None else self.sampler_of_rows(dtype)

    def sampling(self, operator, rows) -> AbstractSampling | None:
        """See `AbstractTraceEstimator`."""
        dtype = BlockOperator(operator).dtype
        sampler = self.sampler_of_samples(rows, dtype)
        return RangeSampling(rows=rows, sampler=sampler, resphere=self.respheres(dtype))

    def sampler_of_rows(self, dtype: np.dtype) -> AbstractSampler:
        """The distribution of the probes for a diagonal: independent entries of modulus 1."""
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        return self.sampler or (SteinhausSampler() if is_complex else RademacherSampler())

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
