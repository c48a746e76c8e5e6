r"""Extreme eigenvalues and their eigenvectors: `eigenpairs`. `extremes` has the algorithm.

*The derivative.* With the eigenvectors held fixed, d lambda_j = v_j^H dA v_j (Hellmann and
Feynman), which is right for a simple eigenvalue up to the residual. As v_j depends on A to first
order, a second derivative with v_j held fixed would be wrong, and is refused.
"""

from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.counts import checked_count
from .._core.estimate import Estimate, make_estimate, rounding_unit
from .._core.precision import any_promotion, matmul
from .._core.primitive import eigenpairs_p
from .._estimators.estimator import check_budget, solve
from .._estimators.solution import described
from .._linalg.lanczos import tridiagonal
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._operators.tags import semidefinite_sign
from .._probes.random import split
from .._probes.samplers import SphereSampler
from .._sketch.weights import AbstractWeights
from .extremes import Which, bounds, chance, order_of, recurrence, ritz_pairs
from .funm import AbstractFunctionEstimator, check_hermitian, spectrum
from .nodes import within_tag

# The probability that the extreme eigenvalue of one end is missed, half of 1 %.
_PROBABILITY = 0.005
# The size of the random part in a warm start.
_NOISE = 1 / 32


def _rounding(block: BlockOperator, size: Real[Array, ""]) -> Real[Array, ""]:
    """How far rounding may move an eigenvalue of an operator of this size: four units of the
    products. (Those of differences of gradients are not all the same, see `hessian`.)
    """
    return rounding_unit(4 * block.eps, size.dtype) * size


@final
class EigenpairWeights(AbstractWeights):
    """The eigenvectors. A contraction costs `num` matvecs, in one block."""

    vectors: Inexact[Array, "num n"]

    def contract(self, block):
        """See `AbstractWeights`."""
        images = block.mm(self.vectors.T)
        return jnp.sum(jnp.conj(self.vectors) * images.T, axis=1).real


@final
class EigenpairsEstimator(AbstractFunctionEstimator):
    """Extreme Ritz pairs. The value of its estimate are the Ritz values, the standard errors are
    their errors, and `aux` has everything else: vectors, residuals and bounds.
    """

    start: Inexact[Array, " n"] | None
    num: int = eqx.field(static=True)
    which: Which = eqx.field(static=True)

    @property
    def smallest(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        """As many products as pairs."""
        return self.num

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_hermitian(operator, "`eigenpairs`")

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        first_key, key = split(key)
        start = SphereSampler().probes(first_key, block.n, 1, block.dtype)[:, 0]
        start = start / jnp.linalg.norm(start)
        noise = None
        if self.start is not None:
            start = self.start.astype(block.dtype) + _NOISE * start
            noise = _NOISE
        krylov = tridiagonal(recurrence(block.mm, start, key, k, block.eps))
        values, vectors = ritz_pairs(krylov)
        wanted = order_of(self.which, values, self.num)
        s = vectors[:, wanted]
        return self._estimate(
            operator,
            values=within_tag(operator, values[wanted], block.eps),
            vectors=matmul(s.T.astype(block.dtype), krylov.basis[:, :, 0]),
            residuals=krylov.residual * jnp.abs(s[-1]),
            bounds=bounds(krylov, values, block.eps, chance(block.n, _PROBABILITY, noise)),
            rounding=_rounding(block, jnp.max(jnp.abs(values))),
            evidence=krylov.hermitian_evidence(block.eps),
            spent=k,
        )

    def exact(self, operator):
        """See `AbstractEstimator`."""
        values, vectors, evidence = spectrum(operator)
        wanted = order_of(self.which, values, self.num)
        ends = values[jnp.array([0, -1])]
        return self._estimate(
            operator,
            values=values[wanted],
            vectors=vectors[:, wanted].T,
            residuals=jnp.zeros(self.num, values.dtype),
            bounds=ends,
            rounding=_rounding(BlockOperator(operator), jnp.max(jnp.abs(ends))),
            evidence=evidence,
            spent=values.size,
        )

    def _estimate(
        self, operator, values, vectors, residuals, bounds, rounding, evidence, spent: int
    ) -> tuple[Estimate, EigenpairWeights]:
        """The estimate, whose standard errors are bounds for the outermost values, and residuals
        for the others.
        """
        sign = semidefinite_sign(operator)
        low = bounds[0] - rounding
        high = bounds[1] + rounding
        if sign > 0:
            low = jnp.maximum(low, jnp.minimum(values[-1], 0))
        if sign < 0:
            high = jnp.minimum(high, jnp.maximum(values[-1], 0))
        residuals = residuals + rounding
        outermost = {
            "LA": high - values[0],
            "SA": values[0] - low,
            "LM": jnp.maximum(high, -low) - jnp.abs(values[0]),
            "BE": values[0] - low,
        }
        errors = residuals.at[0].set(outermost[self.which])
        if self.which == "BE":
            errors = errors.at[-1].set(high - values[-1])
        errors = jnp.maximum(errors, rounding)
        aux = (vectors, residuals, jnp.stack([low, high]))
        estimate = make_estimate(values, errors, spent, 0, evidence, aux=aux)
        return estimate, EigenpairWeights(vectors)


@final
class Eigenpairs(eqx.Module):
    """What `traceax.eigenpairs` finds. Only `values` carries a derivative.

    **Attributes:**

    - `values`: the eigenvalues, an array of shape `(num,)`, the outermost first (for `"BE"` in
        ascending order).
    - `errors`: how far each may be from an eigenvalue. For the outermost value (of each end for
        `"BE"`) the error bounds the distance to the extreme eigenvalue of the operator, but for a
        probability of 1 %; the other ones are residuals.
    - `residuals`: for each pair the norm ||A v - value v||, rounding included. An eigenvalue lies
        within that distance of the value, with certainty; another one, farther out, may have been
        missed.
    - `bounds`: two numbers. The whole spectrum lies between them, but for a probability of 1 %
        (over keys). They are infinite if nothing is known.
    - `vectors`: the eigenvectors, of norm 1: a PyTree of the operator's input structure, whose
        leaves have one more axis in front, of length `num`.
    - `num_matvecs`: the number of products with the operator.
    - `result`: a [`traceax.RESULTS`][]: whether the numbers can be trusted.
    """

    values: Real[Array, " num"]
    errors: Real[Array, " num"]
    residuals: Real[Array, " num"]
    bounds: Real[Array, " 2"]
    vectors: PyTree[Inexact[Array, "num ..."]]
    num_matvecs: Int[Array, ""]
    result: Any  # a member of RESULTS, as in `Solution`

    def __repr__(self) -> str:
        """See `described`."""
        names = "values", "errors", "residuals", "bounds", "num_matvecs"
        parts = {name: getattr(self, name) for name in names}
        return described("Eigenpairs", parts, self.result, entries=True)


Eigenpairs.__init__.__doc__ = (Eigenpairs.__doc__ or "").replace(
    "**Attributes:**", "**Arguments:**"
)


def _start_vector(start: Any, block: BlockOperator) -> Array:
    """The sum of the vectors of an earlier solution, or one vector of the user, of norm 1; 0 where
    it is not finite.
    """
    structure = block.operator.in_structure()
    tree = start.vectors if isinstance(start, Eigenpairs) else start
    axes = int(isinstance(start, Eigenpairs))
    shapes = [jnp.shape(x)[axes:] for x in jtu.tree_leaves(tree)]
    if jtu.tree_structure(tree) != jtu.tree_structure(structure) or shapes != block.shapes:
        raise ValueError(
            "start must be the Eigenpairs of an operator with the same input structure, or one "
            f"vector of that structure, {structure}, got shapes {shapes}. Leave it out for a "
            "random start."
        )
    with any_promotion():
        leaves = [jnp.asarray(x).astype(block.dtype) for x in jtu.tree_leaves(tree)]
        leaves = [(jnp.sum(x, axis=0) if axes else x).reshape(-1) for x in leaves]
        vector = lax.stop_gradient(jnp.concatenate(leaves))
        size = jnp.max(jnp.abs(vector))
        usable = jnp.isfinite(size) & (size > 0)
        vector = jnp.where(usable, vector / jnp.where(usable, size, 1), 0)
        return vector / jnp.where(usable, jnp.linalg.norm(vector), 1)


def eigenpairs(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int,
    num: int = 1,
    which: Which = "LA",
    start: "Eigenpairs | PyTree[Array] | None" = None,
    *,
    throw: bool = False,
) -> Eigenpairs:
    r"""Extreme eigenvalues and eigenvectors of a Hermitian operator, as the sharpness of a loss.

    Lanczos' recurrence, with full reorthogonalisation. A value lies inside the spectrum: the
    largest eigenvalue is never below `values[0]`. How far it may be above is not what a residual
    tells; `errors[0]` does, but for a probability of 1 % over keys: from how unlikely it
    is that a random start vector has hardly any part along the eigenvector.

    With `start`, an earlier solution, a few products follow an operator that changes slowly, such
    as the Hessian in training. A random vector with 1/32 of the norm is added, so that a new
    extreme eigenvalue cannot stay out of sight.

    First derivatives of the values, in forward and reverse mode, are $v^* dA\, v$, with the vectors
    held fixed: those of simple eigenvalues, up to the residual. Second derivatives are refused.

    !!! Example

        ```python
        hessian = tr.curvature.hessian(loss, params, batch)
        sharpness = tr.eigenpairs(jax.random.key(0), hessian, k=20)
        sharpness.values[0], sharpness.errors[0]
        ...  # a few steps of training
        hessian = tr.curvature.hessian(loss, params, batch)
        sharpness = tr.eigenpairs(jax.random.key(1), hessian, k=4, start=sharpness)
        ```

    Cost: exactly `k` matvecs, one by one; a basis of `k + 1` vectors (where memory is short, make
    several calls, each with the one before as `start`); some `8 n k` operations a product. With
    `k >= n`, n matvecs and an eigendecomposition: `n x n` numbers and some `10 n^3` operations. A
    derivative takes `num` tangent products.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a Hermitian lineax operator with `n` rows, between any PyTrees: tagged symmetric
        (if real) or positive or negative semidefinite.
    - `k`: the budget of matvecs, a static Python int, at least `num`. With `k >= n` all is exact.
    - `num`: how many pairs. A multiple eigenvalue shows once at first, and its copies later, once
        the recurrence has come to an end.
    - `which`: `"LA"`, the largest (algebraic) eigenvalues; `"SA"`, the smallest; `"LM"`, those of
        the largest absolute value; `"BE"`, from both ends, of an odd number one more from above.
    - `start`: the [`traceax.Eigenpairs`][] of an earlier operator, or one vector with the structure
        of the operator's input. By default a random vector.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Eigenpairs`][].

    **Raises:**

    - `TypeError`: for a key, operator or `k` of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged Hermitian, `k < 1`, a `num`
        that is not between 1 and n, an unknown `which`, or a `start` of another structure.
    - `NotImplementedError`: for a second derivative.

    ??? cite "References"

        J. Kuczynski, H. Wozniakowski, *Estimating the largest eigenvalue by the power and Lanczos
        algorithms with a random start*, 1992, doi:10.1137/0613066.
        `traceax/_functions/extremes.py` derives the errors.
    """
    operator = as_operator(operator)
    if which not in ("LA", "SA", "LM", "BE"):
        raise ValueError(f"which must be one of 'LA', 'SA', 'LM' and 'BE', got {which!r}.")
    block = BlockOperator(operator)
    n = block.n
    num = checked_count(num, "num (of pairs)")
    if num > n:
        raise ValueError(
            f"num={num} pairs of an operator with {n} rows are too many: give num <= {n}."
        )
    vector = None if start is None else _start_vector(start, block)
    estimator = EigenpairsEstimator(vector, num, which)
    k = check_budget(k, num, n, "`eigenpairs`")
    solution = solve(eigenpairs_p, key, operator, k, estimator, throw=throw)
    vectors, residuals, bounds = lax.stop_gradient(solution.aux)
    return Eigenpairs(
        values=solution.value,
        errors=lax.stop_gradient(solution.std_err),
        residuals=residuals,
        bounds=bounds,
        vectors=jax.vmap(block.unflatten)(vectors),
        num_matvecs=solution.num_matvecs,
        result=solution.result,
    )
