"""Stochastic trace estimation on lineax linear operators."""

from . import curvature as curvature, plot as plot
from ._core.primitive import diagonal_p as diagonal_p, trace_p as trace_p
from ._core.verdict import RESULTS as RESULTS
from ._estimators.auto import AutoTraceEstimator as AutoTraceEstimator
from ._estimators.estimator import AbstractTraceEstimator as AbstractTraceEstimator
from ._estimators.hutchinson import HutchinsonEstimator as HutchinsonEstimator
from ._estimators.hutchpp import HutchPlusPlusEstimator as HutchPlusPlusEstimator
from ._estimators.solution import Solution as Solution
from ._estimators.trace import (
    block_traces as block_traces,
    diagonal as diagonal,
    frobenius_norm as frobenius_norm,
    row_norms as row_norms,
    trace as trace,
)
from ._estimators.xtrace import (
    XNysTraceEstimator as XNysTraceEstimator,
    XTraceEstimator as XTraceEstimator,
)
from ._functions.diagonal import spectral_diagonal as spectral_diagonal
from ._functions.eigenpairs import Eigenpairs as Eigenpairs, eigenpairs as eigenpairs
from ._functions.spectral import (
    eigenvalue_count as eigenvalue_count,
    schatten_norm as schatten_norm,
    spectral_density as spectral_density,
    spectral_sum as spectral_sum,
)
from ._logdet.factors import BuiltPreconditioner as BuiltPreconditioner
from ._logdet.gaussian import gaussian_log_density as gaussian_log_density
from ._logdet.inverse import inverse_diagonal as inverse_diagonal, inverse_trace as inverse_trace
from ._logdet.logdet import logdet as logdet
from ._logdet.preconditioners import (
    KernelPreconditioner as KernelPreconditioner,
    NystromPreconditioner as NystromPreconditioner,
)
from ._operators.checks import inexact as inexact
from ._operators.kernel import KernelLinearOperator as KernelLinearOperator
from ._operators.sparse import SparseLinearOperator as SparseLinearOperator
from ._probes.samplers import (
    AbstractSampler as AbstractSampler,
    NormalSampler as NormalSampler,
    RademacherSampler as RademacherSampler,
    SphereSampler as SphereSampler,
    SteinhausSampler as SteinhausSampler,
)
from ._tracker import Tracker as Tracker, TrackState as TrackState

__version__ = "2.0.0"
