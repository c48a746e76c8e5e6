"""Stochastic trace estimation on lineax linear operators."""

from . import curvature as curvature, plot as plot
from ._core.primitive import diagonal_p as diagonal_p, trace_p as trace_p
from ._deprecated import track as track
from ._diagonal.auto import AutoDiagonalEstimator as AutoDiagonalEstimator
from ._diagonal.diagonal import block_traces as block_traces, diagonal as diagonal
from ._diagonal.diagpp import DiagPlusPlusEstimator as DiagPlusPlusEstimator
from ._diagonal.exact import ExactDiagonalEstimator as ExactDiagonalEstimator
from ._diagonal.hutchinson import HutchinsonDiagonalEstimator as HutchinsonDiagonalEstimator
from ._diagonal.norms import frobenius_norm as frobenius_norm, row_norms as row_norms
from ._diagonal.summary import Summary as Summary, summary as summary
from ._diagonal.xdiag import XDiagEstimator as XDiagEstimator
from ._diagonal.xnysdiag import XNysDiagEstimator as XNysDiagEstimator
from ._estimators.estimator import (
    AbstractDiagonalEstimator as AbstractDiagonalEstimator,
    AbstractTraceEstimator as AbstractTraceEstimator,
)
from ._estimators.solution import RESULTS as RESULTS, Solution as Solution
from ._functions.diagonal import spectral_diagonal as spectral_diagonal
from ._functions.eigenpairs import Eigenpairs as Eigenpairs, eigenpairs as eigenpairs
from ._functions.schatten import schatten_norm as schatten_norm
from ._functions.spectral import (
    eigenvalue_count as eigenvalue_count,
    spectral_density as spectral_density,
    spectral_sum as spectral_sum,
)
from ._logdet.gaussian import gaussian_log_density as gaussian_log_density
from ._logdet.inverse import (
    inverse_diagonal as inverse_diagonal,
    inverse_trace as inverse_trace,
)
from ._logdet.logdet import logdet as logdet
from ._logdet.preconditioners import (
    NystromPreconditioner as NystromPreconditioner,
    RPCholeskyPreconditioner as RPCholeskyPreconditioner,
)
from ._operators.kernel import KernelLinearOperator as KernelLinearOperator
from ._operators.sparse import SparseLinearOperator as SparseLinearOperator
from ._probes.samplers import (
    AbstractSampler as AbstractSampler,
    NormalSampler as NormalSampler,
    RademacherSampler as RademacherSampler,
    SphereSampler as SphereSampler,
    SteinhausSampler as SteinhausSampler,
)
from ._sequences.step import TrackState as TrackState
from ._sequences.tracker import Tracker as Tracker
from ._sketch.low_rank import BuiltPreconditioner as BuiltPreconditioner
from ._trace.adaptive import (
    AdaptiveHutchPlusPlusEstimator as AdaptiveHutchPlusPlusEstimator,
)
from ._trace.auto import AutoTraceEstimator as AutoTraceEstimator
from ._trace.bounds import matvecs_needed as matvecs_needed
from ._trace.exact import ExactTraceEstimator as ExactTraceEstimator
from ._trace.hutchinson import HutchinsonEstimator as HutchinsonEstimator
from ._trace.hutchpp import HutchPlusPlusEstimator as HutchPlusPlusEstimator
from ._trace.trace import trace as trace
from ._trace.xnystrace import XNysTraceEstimator as XNysTraceEstimator
from ._trace.xtrace import XTraceEstimator as XTraceEstimator

__version__ = "2.0.0"
