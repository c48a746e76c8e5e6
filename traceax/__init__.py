"""Stochastic trace estimation on lineax linear operators."""

from . import curvature as curvature, plot as plot
from ._api import (
    block_traces as block_traces,
    diagonal as diagonal,
    frobenius_norm as frobenius_norm,
    row_norms as row_norms,
    trace as trace,
)
from ._bounds import matvecs_needed as matvecs_needed
from ._diagonal.auto import AutoDiagonalEstimator as AutoDiagonalEstimator
from ._diagonal.diagpp import DiagPlusPlusEstimator as DiagPlusPlusEstimator
from ._diagonal.exact import ExactDiagonalEstimator as ExactDiagonalEstimator
from ._diagonal.hutchinson import HutchinsonDiagonalEstimator as HutchinsonDiagonalEstimator
from ._diagonal.xdiag import XDiagEstimator as XDiagEstimator
from ._diagonal.xnysdiag import XNysDiagEstimator as XNysDiagEstimator
from ._estimator import (
    AbstractDiagonalEstimator as AbstractDiagonalEstimator,
    AbstractTraceEstimator as AbstractTraceEstimator,
)
from ._gaussian import gaussian_log_density as gaussian_log_density
from ._logdet import logdet as logdet
from ._logdet_derivative import gradient_std_err as gradient_std_err
from ._low_rank import BuiltPreconditioner as BuiltPreconditioner
from ._precondition import (
    NystromPreconditioner as NystromPreconditioner,
    RPCholeskyPreconditioner as RPCholeskyPreconditioner,
)
from ._primitive import diagonal_p as diagonal_p, trace_p as trace_p
from ._sampler import (
    AbstractSampler as AbstractSampler,
    NormalSampler as NormalSampler,
    RademacherSampler as RademacherSampler,
    SphereSampler as SphereSampler,
    SteinhausSampler as SteinhausSampler,
)
from ._solution import RESULTS as RESULTS, Solution as Solution
from ._sparse import SparseLinearOperator as SparseLinearOperator
from ._spectral import (
    eigenvalue_count as eigenvalue_count,
    spectral_density as spectral_density,
    spectral_sum as spectral_sum,
)
from ._summary import Summary as Summary, summary as summary
from ._trace.adaptive import (
    AdaptiveHutchPlusPlusEstimator as AdaptiveHutchPlusPlusEstimator,
)
from ._trace.auto import AutoTraceEstimator as AutoTraceEstimator
from ._trace.exact import ExactTraceEstimator as ExactTraceEstimator
from ._trace.hutchinson import HutchinsonEstimator as HutchinsonEstimator
from ._trace.hutchpp import HutchPlusPlusEstimator as HutchPlusPlusEstimator
from ._trace.xnystrace import XNysTraceEstimator as XNysTraceEstimator
from ._trace.xtrace import XTraceEstimator as XTraceEstimator
from ._track import Tracker as Tracker, track as track
from ._track_step import TrackState as TrackState

__version__ = "2.0.0"
