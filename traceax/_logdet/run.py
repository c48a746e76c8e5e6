"""What every call does: prepare a preconditioner (`preparation`), then sample (`panels`)."""

import dataclasses
import math
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.control_flow import if_any
from .._core.estimate import Evidence, norm_of, relative, safe_norm, worse
from .._core.precision import einsum
from .._estimators.estimator import AbstractEstimator, check_either, largest_budget, tolerance_of
from .._linalg.conjugate_gradients import start_of_solve
from .._linalg.lanczos import lanczos, quadrature
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._operators.known_parts import has_entries
from .._probes.random import split
from .factors import BuiltPreconditioner, Factors
from .log_quadrature import mean_quotient
from .panels import Sampling, Sums, sampled
from .preconditioners import AbstractPreconditioner, check_definite
from .preparation import SMALLEST, preparation_for

#: The residual that ends a solve, relative to its right-hand side R^{-1} y.
SOLVE_TOLERANCE = 1e-5

#: Up to so many rows panels are narrow.
NARROW_ROWS = 4096

# A Cholesky factorisation takes n^3 / 3 operations, k products with a stored matrix take 2 n^2 k:
# from k = n / 6 on the exact value is cheaper. With few rows it always is.

#: The most rows of a kernel whose matrix is formed for the sake of an exact value, unless the user
#: asks for it (k >= n): 1 GiB in float32.
MOST_ROWS = 2**14

#: Up to so many rows a factorisation takes less time than anything else.
FEW_ROWS = 1024

#: Up to so many rows it takes less time than most tolerances, and at most twice that of others.
FEW_ROWS_OF_TOLERANCES = 4096


def check_fallback(fallback: Any) -> None:
    """Raise a `ValueError` unless this is "exact" or None."""
    if fallback not in ("exact", None):
        raise ValueError(
            f"There is no fallback {fallback!r}. Use 'exact' (the exact value where it is "
            "cheaper) or None."
        )


def budget_or_all(operator: Any, k: Any, *, sparse: bool = False, tolerance: bool = False) -> Any:
    """The budget k, or n where the exact value is cheaper. (Others check operator and budget.) With
    a `tolerance`, k is the largest budget.
    """
    known = isinstance(operator, lx.AbstractLinearOperator) and type(k) is int and k > 0
    if not known or operator.in_size() != operator.out_size():
        return k
    n = operator.in_size()
    few = n <= FEW_ROWS
    worth = few or n <= (FEW_ROWS_OF_TOLERANCES if tolerance else min(6 * k, MOST_ROWS))
    return max(k, n) if worth and has_entries(operator, sparse=sparse or few) else k


class AbstractPreconditionedEstimator(AbstractEstimator):
    """An estimator that goes with a preconditioner ("auto": the choice of `preparation`), and with
    a tolerance if rtol and atol are not None.
    """

    preconditioner: AbstractPreconditioner | BuiltPreconditioner | str | None
    rtol: Any
    atol: Any
    smallest: ClassVar[int] = 2
    weights_depend_on_operator: ClassVar[bool] = True
    inverse: ClassVar[bool] = False  # whether probes are R^{-1} omega: see `inverse`

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_definite(operator, self.label)
        if isinstance(self.preconditioner, AbstractPreconditioner | BuiltPreconditioner):
            self.preconditioner.check(operator)

    def allowed_of_sampled(self, factors: Factors, sampled: Array) -> Array:
        """The error of `sampled`, tr f(M), that ends a call with a tolerance."""
        return self.allowed(factors.log_det + sampled)

    def allowed(self, value: Array) -> Array:
        """The error of a value that ends a call with a tolerance."""
        return self.atol.astype(value.dtype) + self.rtol.astype(value.dtype) * jnp.abs(value)

    def judged(self, estimate):
        """See `AbstractEstimator`: twice the standard error, and the quadrature error, are at most
        the tolerance.
        """
        if self.atol is None:
            return estimate
        error = jnp.maximum(2 * norm_of(estimate.std_err), norm_of(estimate.quadrature_error))
        allowed = self.allowed(norm_of(estimate.value))
        unconverged = Evidence(unconverged=relative(error, allowed))
        return dataclasses.replace(estimate, evidence=worse(estimate.evidence, unconverged))


def check_budget_alone(what: str, tolerance: dict[str, Any]) -> None:
    """Raise a `TypeError` if there is a tolerance."""
    if any(value is not None for value in tolerance.values()):
        raise TypeError(f"{what} goes with a budget, got {tolerance}. Give a budget: `k=200`.")


def fields_and_budget(
    name: str,
    operator: Any,
    k: Any,
    preconditioner: Any,
    fallback: Any,
    tolerance: dict[str, Any],
    inverse: bool = False,
) -> tuple[tuple[Any, Any, Any], Any]:
    """Returns (the fields of an `AbstractPreconditionedEstimator`, budget) for the arguments of a
    user: the budget is n where the exact value is wanted and cheaper. A `TypeError` is raised
    unless the preconditioner is "auto", a way to build one, one that was built, or None, and there
    is either a budget or a tolerance. For functions of the `inverse` sparse matrices count as dense
    ones; `name` is that of the function.
    """
    check_fallback(fallback)
    auto = isinstance(preconditioner, str) and preconditioner == "auto"
    kinds = AbstractPreconditioner if inverse else (AbstractPreconditioner, BuiltPreconditioner)
    if not (auto or preconditioner is None or isinstance(preconditioner, kinds)):
        raise TypeError(
            f"`{name}` takes no {type(preconditioner).__name__} for a preconditioner. Use 'auto', "
            "None, or an instance such as `traceax.NystromPreconditioner(rank=100)`."
        )
    chosen: Any = "auto" if auto else lax.stop_gradient(preconditioner)
    if isinstance(chosen, BuiltPreconditioner):
        check_budget_alone("A built preconditioner", tolerance)
        return (chosen, None, None), k
    rtol = atol = None
    has_tolerance = check_either(name, k, **tolerance)
    if has_tolerance:
        operator = as_operator(operator)
        _, k = largest_budget(tolerance["max_k"], operator.in_size(), name)
        rtol, atol = (tolerance_of(tolerance[x], x) for x in ("rtol", "atol"))
    if auto and fallback == "exact":
        k = budget_or_all(operator, k, sparse=inverse, tolerance=has_tolerance)
    return (chosen, rtol, atol), k


class Run(NamedTuple):
    """The preconditioner, and the sums over all panels."""

    sampling: Sampling
    built: BuiltPreconditioner
    sums: Sums
    spent: Int[Array, ""]  # products for the preconditioner and for probes
    smallest: Real[Array, ""]  # Ritz value of M, or what is known to be less
    stats: dict[str, Array]


def seen_by_ones(
    block: BlockOperator, factors: Factors, steps: int
) -> tuple[Array, tuple[Array, Array], Array | int]:
    """Returns (a bound of the smallest eigenvalue, `eigenpair` of `Sampling`, the products made)
    from the product with 1, the null vector of graph Laplacians and of intrinsic fields, which
    probes hardly see, and for P from entries from `steps` more. For every unit vector v, ||A v|| is
    such a bound.
    """
    unit = factors.unit
    one = unit / safe_norm(unit)
    image = block.mm(jnp.ones((block.n, 1), block.dtype))[:, 0] / unit / safe_norm(unit)
    quotient = jnp.sum(one * image).real
    least = jnp.where(quotient > 0, safe_norm(image), 0)
    none = jnp.zeros_like(image), jnp.ones_like(quotient)
    if factors.from_entries and steps > 0:  # M ~ I: only what is close to null stands out
        small = quotient < 0.1
        found = if_any(small, partial(lowest_from, block, factors, one, steps), none)
        return least, found, 1 + jnp.where(small, steps, 0)
    is_eigenvector = safe_norm(image - quotient * one) < quotient / 10
    is_eigenvector &= ~jnp.any(factors.basis != 0)  # then R^{-1} is diagonal, and the image is M v
    found = jnp.where(is_eigenvector, one, 0), jnp.where(is_eigenvector, quotient, 1)
    return least, found, 1


def lowest_from(
    block: BlockOperator, factors: Factors, start: Array, steps: int
) -> tuple[Array, Array]:
    """The lowest Ritz pair of M in a Krylov space; (0, 1) if it does not stand out, or has not
    converged: with the residual r and the next Ritz value eta, mu is at most r^2 / eta too large.
    """
    start = start[:, None].astype(block.dtype)
    krylov = lanczos(partial(factors.preconditioned, block.mm), start, steps, block.eps)
    nodes, _, vectors = quadrature(krylov)
    (mu, eta), of_mu = nodes[0, :2], vectors[0, :, 0]
    counts = (mu > 0) & (mu < 0.1) & (jnp.square(krylov.residual[0] * of_mu[-1]) < mu * eta / 20)
    vector = einsum("qnp,q->n", krylov.basis, of_mu.astype(block.dtype))
    return jnp.where(counts, vector, 0), jnp.where(counts, mu, 1)


def run_of(
    estimator: AbstractPreconditionedEstimator,
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int,
    *,
    weights: bool,
    y: Inexact[Array, "n t"] | None = None,
    most_solve: int = 0,
) -> Run:
    """Prepare with a part of k products, then sample with the rest. `y` are right-hand sides of a
    solve that shares the products, in at most `most_solve` steps.
    """
    keys = split(key, k + 1)
    inverse = estimator.inverse
    block = BlockOperator(operator).linearised()
    given = keys[0], operator, k, estimator.preconditioner, inverse
    built, spent, stats, sketch = preparation_for(*given)
    factors = built.factors
    least, eigenpair, floor = jnp.full((), jnp.inf, jnp.finfo(block.dtype).dtype), None, built.floor
    # With fewer than nine products this one would cost an inverse its second probe.
    if k >= (9 if inverse else SMALLEST) and not has_entries(operator):
        least, found, made = seen_by_ones(block, factors, 0 if inverse else min(12, k // 5))
        eigenpair = None if inverse else found
        known = jnp.any(found[0] != 0)
        least = jnp.where(known, jnp.minimum(least, found[1]), least)
        if inverse and floor is not None:  # an eigenvalue that probes may miss, if no less is known
            floor = jnp.where((floor > 0) | ~known, floor, found[1])
        spent = spent + made
    # Only the scatter of the probes tells the error of an inverse.
    fewest = max(2, min(4, k // 12)) if inverse and k >= 6 else 1
    target = jnp.zeros((block.n, 0), block.dtype) if y is None else factors.inverse_root(y)
    solve = start_of_solve(target, SOLVE_TOLERANCE, most_solve)
    # A tolerance may end a call after any panel. The first has few probes, to leave products for
    # steps.
    part = k if estimator.atol is None else min(k, 128)
    first = max(fewest, min(k, math.isqrt(part) // 3))
    # The cost grows with the columns, even if unused; with many rows of stored entries hardly.
    width = part // (8 if block.n <= NARROW_ROWS else 3)
    sampling = Sampling(
        block=block,
        factors=factors,
        floor=floor,
        inverse=inverse,
        eigenpair=eigenpair,
        k=k,
        width=max(first, width) if has_entries(operator) else first,
        first=first,
        left=jnp.asarray(k - spent, jnp.int32),
        allowed=None if estimator.atol is None else partial(estimator.allowed_of_sampled, factors),
        weights=weights,
        quotients=None if sketch is None or inverse else mean_quotient(eigenpair, *sketch),
    )
    sums = sampled(keys[1:], sampling, solve)
    smallest = jnp.minimum(sums.probes.smallest, least)
    stats = {"condition": sums.probes.largest / sums.probes.smallest, **stats}
    return Run(sampling, built, sums, spent + sums.spent, smallest, stats)
