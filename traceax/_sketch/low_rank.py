"""Low rank plus a multiple of the identity: the factors of a preconditioner.

Everything is computed for the scaled operator A' = D^{-1/2} A D^{-1/2} = K' + s I. If the operator
is a sum with a diagonal part D, that part is read (`_operators.known_parts`), and s = 1. Otherwise
D is a scalar unit and s is estimated: with theta the smallest Ritz value on the span of the sketch,
and r the norm of its residual, s = theta - min(r, theta / 2). (A Gaussian-process kernel of low
numerical rank plus s I has r = 0 to rounding, so that K' is free of the flat tail.)

A Nystrom approximation or a partial Cholesky factorisation gives K' ~ U Lambda U^H. With t the mean
eigenvalue of the part of K' that is left out, the preconditioner is

    P = D^{1/2} (U Lambda U^H + mu I) D^{1/2},      mu = s + t / 10.

If K' decays slowly, the part left out is far larger than s I, and with mu = s the low-rank part
of little use: t / 10 is close to the best choice on many kernels. As U Lambda U^H <= K', no
eigenvalue of P^{-1} A is below s / mu.
"""

import abc
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from equinox import AbstractVar
from jax import lax
from jaxtyping import Array, Bool, Inexact, Real

from .._core.estimate import Evidence, evidence_of, safe_norm
from .._linalg.factorisations import cholesky, divide_by_upper, eigh, qr, svd
from .._operators.block_operator import BlockOperator, unflatten
from .leave_one_out import adjoint, matmul, shift_of, square_norms, square_of
from .nystrom import shifted_cholesky, skew_of_core


class AbstractFactors(eqx.Module):
    """A preconditioner `P = R R^H`, by products with R^{-1} and R^{-H}.

    `basis` has the shape and dtype of the low-rank part. `row`, the largest Euclidean norm of a
    row, and `top`, the largest eigenvalue, of the operator / `unit` that P was made for bound
    rounding.
    """

    basis: AbstractVar[Inexact[Array, "n l"]]
    row: AbstractVar[Real[Array, ""]]
    top: AbstractVar[Real[Array, ""]]

    @abc.abstractmethod
    def log_det(self) -> Real[Array, ""]:
        """The log-determinant, exactly."""

    @abc.abstractmethod
    def unit(self) -> Real[Array, " n"]:
        """The roots of about 1 / (P^{-1})_ii, in which `row` and `top` are measured."""

    @abc.abstractmethod
    def inverse_root(self, block: Inexact[Array, "n p"]) -> Inexact[Array, "n p"]:
        """R^{-1} times a block."""

    @abc.abstractmethod
    def inverse_root_adjoint(self, block: Inexact[Array, "n p"]) -> Inexact[Array, "n p"]:
        """R^{-H} times a block."""

    @abc.abstractmethod
    def inverse_diagonal(self) -> Real[Array, " n"]:
        """The diagonal of P^{-1}."""

    def solve(self, block: Inexact[Array, "n p"]) -> Inexact[Array, "n p"]:
        """P^{-1} times a block."""
        return self.inverse_root_adjoint(self.inverse_root(block))

    def preconditioned(
        self, mm: Callable[[Array], Array], block: Inexact[Array, "n p"]
    ) -> Inexact[Array, "n p"]:
        """M = R^{-1} A R^{-H} times a block, where `mm` multiplies with A."""
        return self.inverse_root(mm(self.inverse_root_adjoint(block)))


@final
class LowRankPlusIdentity(AbstractFactors):
    """`P = D^{1/2} (U Lambda U^H + mu I) D^{1/2} = R R^H`, with `U^H U = I`.

    A product costs `4 n l` operations for each column, with l the rank.

    **Attributes:**

    - `root`: the root of the diagonal D, of shape `(n,)`; ones if there is no scaling.
    - `basis`: U, of shape `(n, l)` and the working dtype of the operator.
    - `eigenvalues`: the diagonal of Lambda, real and not negative.
    - `mu`: a positive number.
    """

    root: Real[Array, " n"]  # of D
    basis: Inexact[Array, "n l"]  # U
    eigenvalues: Real[Array, " l"]  # Lambda
    mu: Real[Array, ""]

    @property
    def row(self):
        """See `AbstractFactors`."""
        rows = matmul(jnp.square(jnp.abs(self.basis)), jnp.square(self.eigenvalues / self.mu))
        return 1 + jnp.sqrt(jnp.max(rows))

    @property
    def top(self):
        """See `AbstractFactors`."""
        return 1 + jnp.max(self.eigenvalues, initial=0.0) / self.mu

    def unit(self):
        """See `AbstractFactors`."""
        return self.root * jnp.sqrt(self.mu)

    def log_det(self):
        """See `AbstractFactors`."""
        n = self.root.shape[0]
        low_rank = jnp.sum(jnp.log1p(self.eigenvalues / self.mu))
        return low_rank + n * jnp.log(self.mu) + 2 * jnp.sum(jnp.log(self.root))

    def inverse_diagonal(self):
        """See `AbstractFactors`."""
        inside = self.eigenvalues / (self.mu * (self.eigenvalues + self.mu))
        captured = jnp.sum(jnp.square(jnp.abs(self.basis)) * inside, axis=1)
        return (1 / self.mu - captured) / jnp.square(self.root)

    def _inner(self, block: Inexact[Array, "n p"]) -> Inexact[Array, "n p"]:
        """(U Lambda U^H + mu I)^{-1/2} times a block."""
        outside = 1 / jnp.sqrt(self.mu)
        inside = 1 / jnp.sqrt(self.eigenvalues + self.mu) - outside
        captured = inside.astype(block.dtype)[:, None] * matmul(adjoint(self.basis), block)
        return matmul(self.basis, captured) + outside.astype(block.dtype) * block

    def inverse_root(self, block):
        """See `AbstractFactors`."""
        return self._inner(block / self.root[:, None].astype(block.dtype))

    def inverse_root_adjoint(self, block):
        """See `AbstractFactors`."""
        return self._inner(block) / self.root[:, None].astype(block.dtype)

    def outside(self, block: Inexact[Array, "n p"]) -> Inexact[Array, "n p"]:
        """(I - U U^H) times a block, orthogonal to U to rounding. Its columns get the mean length
        of (I - U U^H) w for vectors w whose w w^H has the mean I - U U^H.
        """
        for _ in range(2):
            block = block - matmul(self.basis, matmul(adjoint(self.basis), block))
        length = jnp.sqrt(square_norms(block))
        rank = jnp.sum(square_norms(self.basis))  # columns of U may be 0
        wanted = jnp.sqrt(jnp.maximum(len(block) - rank, 0))  # 0: nothing is outside of U
        return block * (wanted / jnp.where(length > 0, length, 1)).astype(block.dtype)


def diagonal_factors(root: Real[Array, " n"], dtype: Any) -> LowRankPlusIdentity:
    """The factors of a diagonal P with this root."""
    none = jnp.zeros((root.size, 0), dtype), jnp.zeros(0, root.dtype)
    return LowRankPlusIdentity(root, *none, jnp.ones((), root.dtype))  # pyright: ignore


@final
class BuiltPreconditioner(eqx.Module):
    """A preconditioner from the method `build` of [`traceax.NystromPreconditioner`][] or
    [`traceax.RPCholeskyPreconditioner`][].

    As the `preconditioner` of [`traceax.logdet`][] and [`traceax.gaussian_log_density`][] it stays
    the same while the operator changes. For a given key the value is then a smooth function of the
    operator, and the derivative is exactly that of this function.

    It fits operators with as many rows and the same working dtype, and works best for those close
    to the operator it was built for. It is a PyTree of arrays, with `n x rank` numbers: an argument
    of jitted functions, which `vmap` may batch. No derivative flows into it.

    **Attributes:**

    - `factors`: the preconditioner, by products.
    - `floor`: a lower bound of the eigenvalues of $P^{-1} A$, for the operator A that it was built
        for; NaN if no bound is known.
    - `control_variate_weight`: 1 for P = A, and 0 if P leaves out far more than the smallest
        eigenvalue.
    - `evidence`: whether the products that it was built from are those of a definite matrix.
    """

    factors: AbstractFactors
    floor: Real[Array, ""]
    control_variate_weight: Real[Array, ""]
    evidence: Evidence = eqx.field(default_factory=Evidence)

    def inverse(self, structure: Any = None) -> lx.FunctionLinearOperator:
        """The inverse $P^{-1}$ as a positive definite lineax operator: the preconditioner of
        `lineax.CG`, for solves with A or with any operator close to it.

        A product costs `4 n l` operations, with l the rank. No derivative flows into it.

        !!! Example

            ```python
            P = tr.NystromPreconditioner(rank=100).build(jax.random.key(0), operator)
            solver = lx.CG(rtol=1e-6, atol=1e-6)
            solution = lx.linear_solve(operator, b, solver, options={"preconditioner": P.inverse()})
            ```

        **Arguments:**

        - `structure`: that of the vectors, `operator.in_structure()`; by default a single array.

        **Returns:**

        A `lineax.FunctionLinearOperator`.

        **Raises:**

        - `ValueError`: for a structure with another number of entries, or of another dtype.
        """
        factors = lax.stop_gradient(self.factors)
        if structure is None:
            structure = jax.ShapeDtypeStruct(factors.basis.shape[:1], factors.basis.dtype)
        self.check(lx.IdentityLinearOperator(structure))

        def solve(vector):
            leaves = [jnp.ravel(leaf) for leaf in jtu.tree_leaves(vector)]
            return unflatten(structure, factors.solve(jnp.concatenate(leaves)[:, None])[:, 0])

        return lx.FunctionLinearOperator(solve, structure, lx.positive_semidefinite_tag)

    def check(self, operator: lx.AbstractLinearOperator) -> None:
        """Raise a `ValueError` if the preconditioner cannot be used for this operator.

        **Arguments:**

        - `operator`: the operator. Only its structure matters.
        """
        n = self.factors.basis.shape[0]
        dtype = self.factors.basis.dtype
        block = BlockOperator(operator)
        if (n, dtype) != (block.n, block.dtype):
            raise ValueError(
                f"The preconditioner was built for an operator with {n} rows of {dtype}, but this "
                f"{type(operator).__name__} has {block.n} rows of {block.dtype}. Build one for it: "
                "`traceax.NystromPreconditioner(rank=...).build(key, operator)`."
            )


BuiltPreconditioner.__init__.__doc__ = (
    "**Arguments:**" + (BuiltPreconditioner.__doc__ or "").partition("es:**")[2]
)


class LowRank(NamedTuple):
    """An approximation F F^H of K', and how much it leaves out."""

    f: Inexact[Array, "n l"]
    nu: Real[Array, ""]  # the shift: F F^H approximates K' + nu I
    shift: Real[Array, ""]  # s
    left_out: Real[Array, ""]  # t
    evidence: Evidence  # whether the products are those of a definite matrix
    left_out_by_half: Real[Array, ""] | float = math.inf  # t of the first half of the columns
    dimension: Real[Array, ""] | float = math.inf  # of what is left out: see `nystrom_of`

    def preconditioner(self, root: Real[Array, " n"], rank: int) -> LowRankPlusIdentity:
        """The factors of P, with `rank` columns, the last ones 0. Cost: a QR factorisation, l^3."""
        q, r = qr(self.f)
        u, sigma, _ = svd(r)
        eigenvalues = jnp.maximum(jnp.square(sigma) - self.nu, 0)
        more = rank - eigenvalues.size
        basis = jnp.pad(matmul(q, u), ((0, 0), (0, more)))
        parts = root, basis, jnp.pad(eigenvalues, (0, more)), self.mu
        return LowRankPlusIdentity(*parts)  # pyright: ignore

    def built(
        self, root: Real[Array, " n"], known: Bool[Array, ""], rank: int
    ) -> BuiltPreconditioner:
        """The preconditioner, with the lower bound of the eigenvalues."""
        # Without a known s there is no bound.
        floor = jnp.where(known, self.shift / self.mu, jnp.nan)
        control_variate_weight = self.shift / (self.shift + 3 * self.left_out)
        control_variate_weight = jnp.where(control_variate_weight >= 0, control_variate_weight, 0)
        factors = self.preconditioner(root, rank)
        return BuiltPreconditioner(factors, floor, control_variate_weight, self.evidence)

    @property
    def mu(self) -> Real[Array, ""]:
        """The multiple of the identity: never 0, as A' is of size 1."""
        least = float(jnp.finfo(self.left_out.dtype).eps) ** 2
        return jnp.maximum(self.shift + self.left_out / 10, least)


def _smallest(omega: Array, products: Array, eps: float) -> Array:
    """An estimate of the smallest eigenvalue, s (see above)."""
    factor = cholesky(matmul(adjoint(omega), omega))
    # Omega C^{-1} is orthonormal. C is well-conditioned: its inverse is as good as solving with it.
    inverse = divide_by_upper(jnp.eye(factor.shape[0], dtype=factor.dtype), factor)
    core = matmul(adjoint(inverse), matmul(matmul(adjoint(omega), products), inverse))
    values, vectors = eigh((core + adjoint(core)) / 2)  # theta = values[0]
    vector = matmul(inverse, vectors[:, :1])
    residual = matmul(products, vector) - values[0] * matmul(omega, vector)
    size = jnp.sqrt(square_norms(residual))[0]  # r
    floor = 4 * eps * jnp.max(jnp.abs(values))
    return jnp.maximum(values[0] - jnp.clip(size, floor, jnp.maximum(values[0] / 2, floor)), floor)


def nystrom_of(
    omega: Inexact[Array, "n l"],
    products: Inexact[Array, "n l"],
    known: Bool[Array, ""],
    eps: float,
) -> LowRank:
    """The Nystrom approximation of K' = A' - s I from products of A' with normal probes of norm
    about 1; s = 1 if `known`, and is estimated otherwise.

    Holding out one probe after the other, as in XNysTrace, estimates the mean eigenvalue t of the
    part left out, without a product. Cost: about `8 n l^2` operations.
    """
    n, m = omega.shape
    one = jnp.ones((), jnp.finfo(omega.dtype).dtype)
    shift = lax.cond(known, lambda *_: one, partial(_smallest, eps=eps), omega, products)  # s
    sketch = products - shift.astype(omega.dtype) * omega
    # shift_of expects probes of norm sqrt(n). Its norm is that of A', as the products with A' were
    # rounded, not those with K'.
    least = shift_of(math.sqrt(n) * jnp.linalg.norm(products), n, eps)
    core = matmul(adjoint(omega), sketch)
    nu, factor = shifted_cholesky(core, least)
    limit = 100 * math.sqrt(n) * least

    def negative():
        """Whether Omega^H A' Omega, too, has an eigenvalue below 0 by more than rounding."""
        core = matmul(adjoint(omega), products)
        shifted = core + limit * jnp.eye(m, dtype=core.dtype)
        return ~jnp.isfinite(cholesky(shifted)[-1, -1])

    # Where K' looks semidefinite on the sketch, A' = K' + s I is definite there.
    indefinite = lax.cond(nu <= limit, lambda: jnp.array(False), negative)
    norm = jnp.linalg.norm(products)
    skew = skew_of_core(core, norm, n, eps)
    sketch = sketch + nu.astype(omega.dtype) * omega
    f = divide_by_upper(sketch, factor)
    inverse = divide_by_upper(jnp.eye(m, dtype=omega.dtype), factor)

    # t of all columns, and of the first half alone: these columns, and their part of C^{-1}, do not
    # depend on the others.
    half = max(m // 2, 1)
    rows = jnp.concatenate([inverse, jnp.where(jnp.arange(m) < half, inverse[:half], 0)])
    length = safe_norm(rows)
    directions = adjoint(rows / length.astype(omega.dtype)[:, None])
    held_out = n * jnp.square(1 / length) - square_norms(matmul(f, directions))
    # With E what all but two of the probes leave out, the cosine of two directions is that of the
    # vectors E^{1/2} omega of these two (but for its sign). The mean of its square is 1 / d if E
    # has d equal eigenvalues, and else about ||E||_F^2 / (tr E)^2. No eigenvalue is needed.
    cosines = square_of(matmul(adjoint(directions[:, :m]), directions[:, :m]))
    others = jnp.sum(jnp.where(jnp.eye(m, dtype=bool), 0, cosines))
    dimension = m * (m - 1) / others

    def left_out(held_out):
        mean = jnp.mean(held_out) / max(n - held_out.size, 1) - nu
        return jnp.where(jnp.isfinite(mean), jnp.maximum(mean, 0), jnp.nan)

    return LowRank(
        f=f,
        nu=nu,
        shift=shift,
        left_out=left_out(held_out[:m]),
        evidence=evidence_of(norm, skew=skew, outside=indefinite),
        left_out_by_half=left_out(held_out[m:]),
        dimension=dimension.astype(one.dtype),
    )
