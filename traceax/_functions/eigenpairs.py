r"""Extreme eigenvalues and their eigenvectors by Lanczos' recurrence of one vector.

k steps extend an orthonormal basis V, one product a vector,

    A V = V T + beta_k v_next e_k^T,      T = S Theta S^T,

with the residual norm beta_k |S_kj| of a Ritz pair. Where a space is invariant (beta = 0), a random
vector goes on, which finds further copies of a multiple eigenvalue.

*Bounds on the spectrum.* Ritz values are inside the spectrum, and no residual says how far from its
end. But let u be the eigenvector of lambda_max = x, and a_j = <v_j, u>. All v_j are polynomials in
A times the start vector v_0, so

    (x - alpha_j) a_j = beta_{j-1} a_{j-1} + beta_j a_{j+1},

that is, a_j = pi_j(x) a_0 with numbers pi_j(x) that, for x above all Ritz values, grow with x. By
Bessel's inequality sum_j pi_j(x)^2 <= 1 / a_0^2. A random v_0 has |a_0| >= c but for a probability
of at most c sqrt(2n / pi). Hence lambda_max lies below the x where the sum reaches 1 / c^2. (This
is the inequality of J. Kuczynski, H. Wozniakowski, doi:10.1137/0613066, with the recurrence of this
call in place of the worst one.) For a start eps g + y, with g random and y a given unit vector,
c is smaller by the factor eps / (1 + eps): the density of a_0 is largest without y.

There is no such bound for the second value from an end, as a multiple eigenvalue may show once; but
an eigenvalue lies within the residual of each value, with certainty.

*The derivative.* With the eigenvectors held fixed, d lambda_j = v_j^H dA v_j (Hellmann and
Feynman), which is right for a simple eigenvalue up to the residual. As v_j depends on A to first
order, a second derivative with v_j held fixed would be wrong, and is refused.
"""

import math
from functools import partial
from typing import Any, Literal, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.counts import checked_count
from .._core.estimate import Estimate, rounding_unit, scale_of
from .._core.precision import any_promotion, matmul
from .._core.primitive import eigenpairs_p
from .._estimators.estimator import check_budget, estimated
from .._estimators.solution import described
from .._linalg.arnoldi import Arnoldi, Product, arnoldi, orthogonal_part
from .._linalg.factorisations import ritz_values
from .._linalg.lanczos import Lanczos, symmetric_tridiagonal, tridiagonal
from .._operators.block_operator import BlockOperator, unflatten
from .._operators.tags import semidefinite_sign
from .._probes.random import numbered, split
from .._probes.samplers import SphereSampler
from .funm import AbstractFunctionEstimator, hermitian_operator, spectrum
from .nodes import within_tag

Which = Literal["LA", "SA", "LM", "BE"]

# The probability that the extreme eigenvalue of one end is missed, half of 1 %.
_PROBABILITY = 0.005
# The size of the random part in a warm start.
_NOISE = 1 / 32


def recurrence(
    mm: Product, start: Inexact[Array, " n"], key: PRNGKeyArray, k: int, eps: float
) -> Arnoldi:
    """V and T from exactly `k` < n products of a Hermitian operator and a start vector that is not
    0. The key makes the vectors that go on in an invariant space.
    """

    def fresh(j, basis):
        probe = SphereSampler().probes(numbered(key, j), start.size, 1, start.dtype)
        probe, _ = orthogonal_part(basis, probe.T)
        return probe / jnp.linalg.norm(probe)

    return arnoldi(mm, start[:, None], k, eps, fresh)


def order_of(which: Which, values: Real[Array, " m"], num: int) -> Array:
    """The indices of `num` of the ascending values, the outermost first; for `"BE"` in ascending
    order, one more from above if `num` is odd.
    """
    place = jnp.arange(values.size)
    if which == "BE":
        return jnp.concatenate([place[: num // 2], place[values.size - (num - num // 2) :]])
    if which == "LM":
        place = jnp.argsort(-jnp.abs(values))
    return place[::-1][:num] if which == "LA" else place[:num]


def log_sum(
    alpha: Real[Array, " k"], beta: Real[Array, " k"], smallest: Array, x: Real[Array, " g"]
) -> Real[Array, " g"]:
    """The logarithm of sum_j pi_j(x)^2 at points x above all Ritz values, from positive ratios
    rho_j = a_{j+1} / a_j. Ratios that rounding makes negative count as 0, which enlarges the bound.
    """
    tiny = float(jnp.finfo(x.dtype).tiny) ** 0.5

    def step(carry, coefficients):
        quotient, log_a, total = carry  # the last beta / rho; log a_j; log of the sum of a_i^2
        alpha, beta = coefficients
        floor = jnp.maximum(beta, smallest)
        rho = jnp.maximum((x - alpha - quotient) / floor, tiny)
        log_a = log_a + jnp.log(rho)
        total = jnp.logaddexp(total, 2 * log_a)
        # Behind an invariant space comes a random vector, of which nothing is known.
        return (floor / rho, jnp.where(beta == 0, -jnp.inf, log_a), total), None

    zero = jnp.zeros_like(x)
    (_, _, total), _ = lax.scan(step, (zero, zero, zero), (alpha, beta))
    return total


def bounds(
    krylov: Lanczos, values: Real[Array, " k"], eps: float, log_chance: float
) -> Real[Array, " 2"]:
    """The [lower, upper] ends of the whole spectrum, but for a small probability: where the
    `log_sum` reaches `log_chance` = -2 log c, rounded outwards; infinite beyond 10^9 times the size
    of A.
    """
    unit = scale_of(krylov.size[0])
    size = krylov.size[0] / unit
    beta = krylov.beta[:, 0] / unit
    limits = jnp.finfo(beta.dtype)
    smallest = jnp.maximum(rounding_unit(eps, limits.dtype) * size, limits.tiny)
    # Points 3 % apart.
    ends = math.log(float(limits.eps)), math.log(1e9)
    distances = jnp.exp(jnp.linspace(*ends, 2017, dtype=beta.dtype))
    distances = jnp.maximum(size, limits.tiny) * distances

    def distance(sign):  # from the last Ritz value of A or -A to the bound
        alpha = sign * krylov.alpha[:, 0] / unit
        end = jnp.max(sign * values) / unit
        reached = log_sum(alpha, beta, smallest, end + distances) >= log_chance
        # The distance after the last at which the sum is too small.
        index = jnp.max(jnp.where(reached, -1, jnp.arange(distances.size))) + 1
        found = jnp.append(distances, jnp.inf)[index]
        return unit * jnp.where(size > 0, found, 0)

    return jnp.stack([values[0] - distance(-1), values[-1] + distance(1)])


@final
class EigenpairsEstimator(AbstractFunctionEstimator):
    """Extreme Ritz pairs. The value of the estimate are the Ritz values, the standard errors are
    their errors, and `aux` is (vectors of shape `(num, n)`, residuals, the two bounds).
    """

    start: Inexact[Array, " n"] | None  # of norm 1, or 0
    num: int = eqx.field(static=True)
    which: Which = eqx.field(static=True)

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        first_key, key = split(key)
        start = SphereSampler().probes(first_key, block.n, 1, block.dtype)[:, 0]
        start = start / jnp.linalg.norm(start)
        least = _PROBABILITY / math.sqrt(2 * block.n / math.pi)  # c
        if self.start is not None:
            start = self.start.astype(block.dtype) + _NOISE * start
            least = least * _NOISE / (1 + _NOISE)
        krylov = tridiagonal(recurrence(block.mm, start, key, k, block.eps))  # V, T
        t = symmetric_tridiagonal(krylov.alpha[:, 0], krylov.beta[:-1, 0])
        values, vectors = ritz_values(t, jnp.ones(k, bool))
        wanted = order_of(self.which, values, self.num)
        s = vectors[:, wanted]  # columns of S
        return self._estimate(
            operator,
            values,
            wanted,
            vectors=matmul(s.T.astype(block.dtype), krylov.basis[:, :, 0]),
            residuals=krylov.residual * jnp.abs(s[-1]),
            bounds=bounds(krylov, values, block.eps, -2 * math.log(least)),
            evidence=krylov.evidence(block.eps),
        )

    def exact(self, operator):
        """See `AbstractEstimator`."""
        values, vectors, evidence = spectrum(operator)
        wanted = order_of(self.which, values, self.num)
        return self._estimate(
            operator,
            values,
            wanted,
            vectors=vectors[:, wanted].T,
            residuals=jnp.zeros(self.num, values.dtype),
            bounds=values[jnp.array([0, -1])],
            evidence=evidence,
        )

    def _estimate(
        self, operator, values, wanted, vectors, residuals, bounds, evidence
    ) -> tuple[Estimate, Array]:
        """Returns (estimate of the `wanted` Ritz values, their vectors). The errors are bounds for
        the outermost values, and residuals for the others.
        """
        spent = values.size
        size = jnp.max(jnp.abs(values))
        eps = BlockOperator(operator).eps
        values = within_tag(operator, values, eps)[wanted]
        sign = semidefinite_sign(operator)
        # Four units: products of differences of gradients are not all the same, see `hessian`.
        rounding = rounding_unit(4 * eps, size.dtype) * size
        low = bounds[0] - rounding
        high = bounds[1] + rounding
        if sign > 0:
            low = jnp.maximum(low, jnp.minimum(values[-1], 0))
        if sign < 0:
            high = jnp.minimum(high, jnp.maximum(values[-1], 0))
        residuals = residuals + rounding
        outermost = {"LA": high - values[0], "LM": jnp.maximum(high, -low) - jnp.abs(values[0])}
        errors = residuals.at[0].set(outermost.get(self.which, values[0] - low))
        if self.which == "BE":
            errors = errors.at[-1].set(high - values[-1])
        errors = jnp.maximum(errors, rounding)
        aux = (vectors, residuals, jnp.stack([low, high]))
        return Estimate(values, errors, spent, 0, evidence, aux=aux), vectors

    def contract(self, weights, operator):
        """See `AbstractEstimator`: `num` matvecs with the eigenvectors, in one block."""
        images = BlockOperator(operator).mm(weights.T)
        return jnp.sum(jnp.conj(weights) * images.T, axis=1).real


@final
class Eigenpairs(eqx.Module):
    r"""The result of `traceax.eigenpairs`. Only `values` carries a derivative.

    **Attributes:**

    - `values`: the eigenvalues, an array of shape `(num,)`, the outermost first (for `"BE"` in
        ascending order).
    - `errors`: how far each may be from an eigenvalue: for the outermost value (of each end for
        `"BE"`) from the extreme eigenvalue, but for a probability of 1 %; for others the residual.
    - `residuals`: for each pair $(\theta, v)$ the norm $\|A v - \theta v\|$, rounding included. An
        eigenvalue lies within that distance of the value, with certainty.
    - `bounds`: two numbers between which the whole spectrum lies, but for a probability of 1 %
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


Eigenpairs.__init__.__doc__ = "**Arguments:**" + (Eigenpairs.__doc__ or "").partition("es:**")[2]


def _start_vector(start: Any, block: BlockOperator) -> Array:
    """The sum of the vectors of an earlier solution, or one vector, of norm 1; 0 if not finite."""
    structure = block.operator.in_structure()
    several = isinstance(start, Eigenpairs)
    tree = start.vectors if several else jtu.tree_map(lambda x: jnp.asarray(x)[None], start)
    leaves = jtu.tree_leaves(tree)
    shapes = [x.shape[1:] for x in leaves]
    if jtu.tree_structure(tree) != jtu.tree_structure(structure) or shapes != block.shapes:
        raise ValueError(
            "start must be the Eigenpairs of an operator with the same input structure, or one "
            f"vector of that structure, {structure}, got shapes {shapes}. Leave it out for a "
            "random start."
        )
    with any_promotion():
        sums = [jnp.sum(x.astype(block.dtype), axis=0).reshape(-1) for x in leaves]
        vector = lax.stop_gradient(jnp.concatenate(sums))
        vector = vector / scale_of(vector)
        norm = jnp.linalg.norm(vector)
        usable = jnp.isfinite(norm) & (norm > 0)
        return jnp.where(usable, vector, 0) / jnp.where(usable, norm, 1)


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
    r"""Extreme eigenvalues, such as the sharpness of a loss, and eigenvectors of a Hermitian
    operator.

    Lanczos' recurrence, with full reorthogonalisation: a value lies inside the spectrum;
    `errors[0]` says how far the extreme eigenvalue may be, but for a probability of 1 % over keys.
    With `start`, an earlier solution, a few products follow an operator that changes slowly (a
    random vector with 1/32 of the norm is added, for a new extreme eigenvalue to be seen).

    **Cost:** exactly `k` matvecs, one by one; `k n` numbers; some `8 n k` operations a product.
    First derivatives of the values (of simple eigenvalues) take `num` products.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a Hermitian lineax operator with `n` rows, between any PyTrees: tagged symmetric
        (if real) or positive or negative semidefinite.
    - `k`: the budget of matvecs, a static Python int, at least `num`. With `k >= n` all is exact.
    - `num`: how many pairs. Copies of a multiple eigenvalue show after the first one.
    - `which`: `"LA"`, the largest (algebraic) eigenvalues; `"SA"`, the smallest; `"LM"`, those of
        the largest absolute value; `"BE"`, from both ends, of an odd number one more from above.
    - `start`: the [`traceax.Eigenpairs`][] of an earlier operator, or one vector with the structure
        of the operator's input. By default a random vector.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:** a [`traceax.Eigenpairs`][].

    **Raises:** `TypeError`, `ValueError`; `NotImplementedError` for a second derivative.
    """
    operator = hermitian_operator(operator, "`eigenpairs`")
    if which not in ("LA", "SA", "LM", "BE"):
        raise ValueError(f"which must be 'LA', 'SA', 'LM' or 'BE', got {which!r}. Largest: 'LA'.")
    block = BlockOperator(operator)
    n = block.n
    num = checked_count(num, "num (of pairs)")
    if num > n:
        raise ValueError(
            f"num={num} pairs of an operator with {n} rows are too many. Give num <= {n}."
        )
    vector = None if start is None else _start_vector(start, block)
    estimator = EigenpairsEstimator(vector, num, which)
    k = check_budget(k, num, n, "`eigenpairs`")
    solution = estimated(eigenpairs_p, key, operator, k, estimator, throw=throw)
    vectors, residuals, bounds = lax.stop_gradient(solution.aux)
    return Eigenpairs(
        values=solution.value,
        errors=lax.stop_gradient(solution.std_err),
        residuals=residuals,
        bounds=bounds,
        vectors=jax.vmap(partial(unflatten, operator.in_structure()))(vectors),
        num_matvecs=solution.num_matvecs,
        result=solution.result,
    )
