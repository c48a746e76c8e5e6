"""Public names for authors of estimators, samplers and preconditioners.

`import traceax.extend as tre`. The page "Write your own estimator" of the documentation shows how
these parts go together, and [`traceax.testing.check_estimator`][] checks the result. The rules for
public names hold here as well.
"""

from ._core.estimate import (
    Estimate as Estimate,
    Evidence as Evidence,
    evidence_of as evidence_of,
    mean_and_std_err as mean_and_std_err,
    norm_of as norm_of,
    rounding_of as rounding_of,
)
from ._core.precision import matmul as matmul
from ._estimators.estimator import AbstractTraceEstimator as AbstractTraceEstimator
from ._estimators.rows import Rows as Rows
from ._estimators.tolerance import RangeSampling as RangeSampling
from ._logdet.factors import (
    BuiltPreconditioner as BuiltPreconditioner,
    low_rank_plus_diagonal as low_rank_plus_diagonal,
)
from ._logdet.preconditioners import AbstractPreconditioner as AbstractPreconditioner
from ._operators.block_operator import BlockOperator as BlockOperator
from ._operators.known_parts import (
    columns as columns,
    stored_diagonal as stored_diagonal,
    stored_entries as stored_entries,
)
from ._operators.precision import product_precision as product_precision
from ._operators.tags import is_hermitian as is_hermitian
from ._probes.random import numbered as numbered
from ._probes.samplers import AbstractSampler as AbstractSampler
from ._sketch.weights import AbstractWeights as AbstractWeights, LowRankWeights as LowRankWeights
