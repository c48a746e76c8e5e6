r"""Extreme eigenvalues and their eigenvectors: `eigenpairs`. `thick_restart` has the algorithm.

*The derivative.* With the eigenvectors held fixed, d lambda_j = v_j^H dA v_j (Hellmann and
Feynman), which is right for a simple eigenvalue up to the residual. As v_j depends on A to first
order, a second derivative with v_j held fixed would be wrong, and is refused.
"""

import dataclasses
import math
from typing import Any, ClassVar, NoReturn, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.counts import checked_count
from .._core.estimate import Estimate, make_estimate, rounding_unit
from .._core.precision import any_promotion
from .._core.primitive import eigenpairs_p
from .._estimators.estimator import AbstractEstimator, check_budget, solve
from .._estimators.solution import described
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._operators.tags import semidefinite_sign
from .._operators.width import BLOCK_LIMIT
from .._probes.random import split
from .._probes.samplers import SphereSampler
from .._sketch.weights import AbstractWeights
from .funm import check_hermitian, spectrum
from .nodes import within_tag
from .thick_restart import Which, chance, cycles_of, order_of, ritz_pairs, run_cycles

# The probability that the extreme eigenvalue of one end is missed, half of 1 %.
_PROBABILITY = 0.005
# The size of the random part in a warm start.
_NOISE = 1 / 32
# The most vectors of a basis: with more, the projected matrix would take longer than a restart.
_LARGEST_BASIS = 256


def _rounding(block: BlockOperator, size: Real[Array, ""]) -> Real[Array, ""]:
    """How far rounding may move an eigenvalue of an operator of this size: four units of the
    products. (Those of differences of gradients are not all the same, see `hessian`.)
    """
    return rounding_unit(4 * block.eps, size.dtype) * size


@final
class EigenpairWeights(AbstractWeights):
    """The eigenvectors. A contraction costs `num` matvecs, in one block."""

    vectors: Inexact[Array, "num n"]

    def contract(self, operator):
        """See `AbstractWeights`."""
        images = BlockOperator(operator).mm(self.vectors.T)
        return jnp.sum(jnp.conj(self.vectors) * images.T, axis=1).real


@final
class EigenpairsEstimator(AbstractEstimator):
    """Extreme Ritz pairs. The value of its estimate are the Ritz values, the standard errors are
    their errors, and the state has everything else: vectors, residuals and bounds.
    """

    start: Inexact[Array, " n"] | None
    num: int = eqx.field(static=True)
    which: Which = eqx.field(static=True)
    basis_size: int = eqx.field(static=True)
    weights_depend_on_operator: ClassVar[bool] = True

    @property
    def smallest(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        """As many products as pairs."""
        return self.num

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_hermitian(operator, "`eigenpairs`")

    def _estimate(
        self, operator, values, vectors, residuals, bounds, rounding, status, spent: int
    ) -> tuple[Estimate, EigenpairWeights]:
        sign, place = semidefinite_sign(operator), jnp.arange(self.num)
        low, high = bounds[0] - rounding, bounds[1] + rounding
        if sign > 0:
            low = jnp.maximum(low, jnp.minimum(values[-1], 0))
        if sign < 0:
            high = jnp.minimum(high, jnp.maximum(values[-1], 0))
        below, above = values - low, high - values
        residuals = residuals + rounding
        if self.which == "BE":
            errors = jnp.where(place == self.num - 1, above, residuals)
            errors = jnp.where((place == 0) & (self.num > 1), below, errors)
        else:
            largest = jnp.maximum(high, -low) - jnp.abs(values)
            outermost = {"LA": above, "SA": below, "LM": largest}[self.which]
            errors = jnp.where(place == 0, outermost, residuals)
        errors = jnp.maximum(errors, rounding)
        estimate = make_estimate(values, errors, spent, 0, status)
        state = (vectors, residuals, jnp.stack([low, high]))
        return dataclasses.replace(estimate, state=state), EigenpairWeights(vectors)

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        n, (first_key, key) = block.n, split(key)
        start = SphereSampler().probes(first_key, n, 1, block.dtype)[:, 0]
        start, noise = start / jnp.linalg.norm(start), None
        if self.start is not None:
            start, noise = self.start.astype(block.dtype) + _NOISE * start, _NOISE
        run = run_cycles(block.mm, start, key, k, self.num, self.which, self.basis_size, block.eps)
        log_chance = chance(n, _PROBABILITY, noise)
        pairs = ritz_pairs(run, self.num, self.which, block.eps, log_chance)
        values = within_tag(operator, pairs.values, block.eps)
        size = jnp.max(jnp.abs(pairs.ends))
        # Every restart rounds the vectors that it keeps.
        cycles = cycles_of(k, self.num, self.basis_size)
        rounding = _rounding(block, size) * math.sqrt(cycles)
        errors = pairs.residuals, pairs.bounds, rounding
        return self._estimate(operator, values, pairs.vectors, *errors, pairs.status, k)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        values, vectors, status = spectrum(operator)
        n = values.size
        wanted = order_of(self.which, values, n, self.num)
        ends = jnp.stack([values[0], values[-1]])
        rounding = _rounding(BlockOperator(operator), jnp.max(jnp.abs(ends)))
        chosen, zero = values[wanted], jnp.zeros(self.num, values.dtype)
        return self._estimate(
            operator, chosen, vectors[:, wanted].T, zero, ends, rounding, status, n
        )

    def weights_at(self, weights, operator) -> NoReturn:
        """See `AbstractEstimator`: the derivative of the eigenvectors is not computed."""
        raise NotImplementedError(
            "Eigenvalues have a first derivative only: theirs is taken with eigenvectors held "
            "fixed, which to second order would give wrong numbers. Use `lax.stop_gradient` on "
            "whatever need not be differentiated twice, or finite differences of the gradient."
        )


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


def _flat(tree: PyTree, dtype: Any, axes: int) -> Array:
    """The leaves as one array, with so many axes in front."""
    with any_promotion():
        leaves = [jnp.asarray(x).astype(dtype) for x in jtu.tree_leaves(tree)]
        return jnp.concatenate([x.reshape(*x.shape[:axes], -1) for x in leaves], axis=-1)


def _start_vector(start: Any, block: BlockOperator) -> Array:
    """The sum of the vectors of an earlier solution, or one vector of the user, of norm 1; 0 where
    it is not finite.
    """
    structure = block.operator.in_structure()
    tree = start.vectors if isinstance(start, Eigenpairs) else start
    axes = int(isinstance(start, Eigenpairs))

    def shapes(tree):
        return jtu.tree_structure(tree), [jnp.shape(x)[axes:] for x in jtu.tree_leaves(tree)]

    expected = jtu.tree_structure(structure), block.shapes
    if shapes(tree) != expected:
        raise ValueError(
            "start must be the Eigenpairs of an operator with the same input structure, or one "
            f"vector of that structure, {structure}, got shapes {shapes(tree)[1]}. Leave it "
            "out for a random start."
        )
    with any_promotion():
        vector = lax.stop_gradient(_flat(tree, block.dtype, axes))
        if axes:
            vector = jnp.sum(vector, axis=0)
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
    basis_size: int | None = None,
    throw: bool = False,
) -> Eigenpairs:
    r"""Extreme eigenvalues and eigenvectors of a Hermitian operator, as the sharpness of a loss.

    Lanczos' recurrence, with full reorthogonalisation and thick restarts. A value lies inside the
    spectrum: the largest eigenvalue is never below `values[0]`. How far it may be above is not what
    a residual tells; `errors[0]` does, but for a probability of 1 % over keys: from how unlikely it
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

    Cost: exactly `k` matvecs, one by one; a basis of `basis_size + 1` vectors; some
    `8 n basis_size` operations a product. With `k >= n`, n matvecs and an eigendecomposition:
    `n x n` numbers and some `10 n^3` operations. A derivative takes `num` tangent products.

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
    - `basis_size`: the most vectors to hold, `num + 2` or more. By default as many as make up 2^27
        numbers, but at most 256, and at least `2 num + 16`. With `k` or more there are no restarts.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Eigenpairs`][].

    **Raises:**

    - `TypeError`: for a key, operator or `k` of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged Hermitian, `k < 1`, a `num`
        that is not between 1 and n, an unknown `which`, a `start` of another structure, or a
        `basis_size` below `num + 2`.
    - `NotImplementedError`: for a second derivative.

    ??? cite "References"

        K. Wu, H. Simon, *Thick-restart Lanczos method for large symmetric eigenvalue problems*,
        2000, doi:10.1137/S0895479898334605. J. Kuczynski, H. Wozniakowski, *Estimating the largest
        eigenvalue by the power and Lanczos algorithms with a random start*, 1992,
        doi:10.1137/0613066. `traceax/_functions/thick_restart.py` derives the errors.
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
    if basis_size is None:
        basis_size = max(2 * num + 16, min(_LARGEST_BASIS, BLOCK_LIMIT // n))
    size = checked_count(basis_size, "basis_size (vectors, two more than pairs)", num + 2)
    vector = None if start is None else _start_vector(start, block)
    estimator = EigenpairsEstimator(vector, num, which, size)
    k = check_budget(k, num, n, "`eigenpairs`")
    solution = solve(eigenpairs_p, key, operator, k, estimator, throw=throw)
    vectors, residuals, bounds = lax.stop_gradient(solution.state)
    return Eigenpairs(
        values=solution.value,
        errors=lax.stop_gradient(solution.std_err),
        residuals=residuals,
        bounds=bounds,
        vectors=jax.vmap(block.unflatten)(vectors),
        num_matvecs=solution.num_matvecs,
        result=solution.result,
    )
