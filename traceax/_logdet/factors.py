r"""Factors of a preconditioner: low rank plus a sparse inverse factor.

With F, n x r, and L, whose column i has few entries,

    P = L^{-H} L^{-1} + F F^H = L^{-H} (I + G G^H) L^{-1},      G = L^H F.

With N = I + G^H G = C C^H (C lower triangular), J = C^{-H} (C + I)^{-1},

    W = L (I - G J G^H),      W W^H = P^{-1},      log det P = -2 sum log L_ii + 2 sum log C_ii.

(With X = (C + I)^{-1}, X C = I - X, and J + J^H - J (N - I) J^H = C^{-H} [X C + C^H X^H
- X (C C^H - I) X^H] C^{-1} = C^{-H} [2 I - X - X^H - (I - X) (I - X)^H + X X^H] C^{-1} = N^{-1}.)
Products with W and W^H need no triangular solve with n rows.
"""

import math
from collections.abc import Callable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, Int, Real

from .._core.estimate import Evidence, scale_of
from .._core.precision import adjoint, any_promotion, einsum, matmul, square_norms, square_of
from .._linalg.factorisations import generic, lower_cholesky, lower_solve
from .._operators.block_operator import BlockOperator, unflatten
from .._operators.known_parts import submatrices

#: The numbers in a block of rows.
BLOCK = 2**21


@final
class Factors(eqx.Module):
    """`P = W^{-H} W^{-1}`: see above. Products with W cost `2 n (s + 2 r)` operations for each
    column.
    """

    sets: Int[Array, "n s"]  # the places of column i of L, with i last
    values: Inexact[Array, "n s"]  # its entries there; 0 where a place is not in use
    basis: Inexact[Array, "n r"]  # G
    core: Inexact[Array, "r r"]  # J
    log_det: Real[Array, ""]  # log det P
    unit: Real[Array, " n"]  # the roots of about 1 / (P^{-1})_ii: P^{-1} ~ L L^H
    # The largest norm of a row and the largest eigenvalue of the operator that P was made for, in
    # units of `unit`, about: they say how large rounding errors are. 0 where nothing is known of A.
    row: Real[Array, ""]
    top: Real[Array, ""]
    from_entries: bool = eqx.field(static=True, default=False)  # see `weights`

    @property
    def has_low_rank(self) -> bool:
        """Whether P is more than a diagonal. Of a diagonal P, omega o P^{-1} omega is the diagonal
        of P^{-1}, for random signs: inverses then subtract nothing that would cancel.
        """
        return self.basis.shape[1] > 0

    def inverse_root(self, block: Inexact[Array, "n p"]) -> Inexact[Array, "n p"]:
        """R^{-1} = W^H times a block."""
        gathered = gathered_by(self.sets, self.values, block)
        coefficients = matmul(adjoint(self.core), matmul(adjoint(self.basis), gathered))
        return gathered - matmul(self.basis, coefficients)

    def inverse_root_adjoint(self, block: Inexact[Array, "n p"]) -> Inexact[Array, "n p"]:
        """R^{-H} = W times a block."""
        coefficients = matmul(self.core, matmul(adjoint(self.basis), block))
        return self.scattered(block - matmul(self.basis, coefficients))

    def solve(self, block: Inexact[Array, "n p"]) -> Inexact[Array, "n p"]:
        """P^{-1} times a block."""
        return self.inverse_root_adjoint(self.inverse_root(block))

    def preconditioned(
        self, mm: Callable[[Array], Array], block: Inexact[Array, "n p"]
    ) -> Inexact[Array, "n p"]:
        """M = R^{-1} A R^{-H} times a block, where `mm` multiplies with A."""
        return self.inverse_root(mm(self.inverse_root_adjoint(block)))

    def scattered(self, block: Inexact[Array, "n p"]) -> Inexact[Array, "n p"]:
        """L times a block."""

        def add(place, total):
            rows, values = self.sets[:, place], self.values[:, place, None]
            return total.at[rows].add(values * block)

        return over_places(add, self.sets, block)

    def captured(self) -> Inexact[Array, "n r"]:
        """E = L G C^{-H}, with P^{-1} = L L^H - E E^H."""
        return self.scattered(adjoint(lower_solve(_root_of(self.basis), adjoint(self.basis))))

    def inverse_diagonal(self) -> Real[Array, " n"]:
        """The diagonal of P^{-1}."""
        return 1 / jnp.square(self.unit) - jnp.sum(square_of(self.captured()), axis=1)

    def known_part(self, operator: lx.AbstractLinearOperator) -> Real[Array, ""]:
        """`Re <L L^H, A>`, from the entries of the neighbourhoods."""
        n, s = self.sets.shape

        def of_block(rows):
            values = self.values[rows]
            blocks = submatrices(operator, self.sets[rows])
            return einsum("ba,bac,bc->b", jnp.conj(values), blocks, values).real

        return jnp.sum(by_rows(jax.checkpoint(of_block), n, s * s))


def _root_of(g: Inexact[Array, "n r"]) -> Inexact[Array, "r r"]:
    """C, the root of N = I + G^H G."""
    return lower_cholesky(matmul(adjoint(g), g) + jnp.eye(g.shape[1], dtype=g.dtype))


def gathered_by(
    sets: Int[Array, "n s"], values: Inexact[Array, "n s"], block: Inexact[Array, "n p"]
) -> Inexact[Array, "n p"]:
    """L^H times a block, with the `values` of L at `sets`."""

    def add(place, total):
        return total + jnp.conj(values[:, place, None]) * block[sets[:, place]]

    return over_places(add, sets, block)


def over_places(
    add: Callable[[Array, Array], Array], sets: Int[Array, "n s"], block: Inexact[Array, "n p"]
) -> Inexact[Array, "n p"]:
    """The total after `add(place, total)` for every place, from 0. All places at once would take s
    times the memory; so a derivative gathers again.
    """
    add = jax.checkpoint(add, prevent_cse=False)
    return lax.fori_loop(0, sets.shape[1], add, jnp.zeros_like(block))


def by_rows(fn: Callable[[Any], Any], n: int, size: int) -> Any:
    """`fn(rows)` for all rows, stacked; blocks of rows, of `size` numbers a row, go in turn."""
    width = max(1, min(n, BLOCK // size))
    count = -(-n // width)
    rows = jnp.minimum(jnp.arange(count * width), n - 1).reshape(count, width)
    found = lax.map(fn, rows)
    return jax.tree.map(lambda x: x.reshape(count * width, *x.shape[2:])[:n], found)


def factors_of(
    f: Inexact[Array, "n r"],
    sets: Int[Array, "n s"],
    values: Inexact[Array, "n s"],
    diagonal: Real[Array, " n"],
    *,
    from_entries: bool,
) -> Factors:
    """P from F and L; `diagonal` is that of A, not of P. In every row of `sets` place i is last,
    with a positive value; places that are not in use have the value 0.
    """
    g = gathered_by(sets, values, f)
    c = _root_of(g)
    eye = jnp.eye(f.shape[1], dtype=f.dtype)
    core = lower_solve(c, lower_solve(c + eye, eye), adjoint=True)
    logs = jnp.sum(jnp.log(values[:, -1].real))
    log_det = 2 * (jnp.sum(jnp.log(jnp.diagonal(c).real)) - logs)
    squares = square_of(values)
    unit = 1 / jnp.sqrt(jnp.zeros(len(squares), squares.dtype).at[sets].add(squares))
    return Factors(sets, values, g, core, log_det, unit, *_sizes(f, unit, diagonal), from_entries)


def low_rank_plus_diagonal(
    f: Inexact[Array, "n r"], diagonal: Real[Array, " n"], from_entries: bool = False
) -> Factors:
    """The factors of $P = F F^* + D$.

    **Arguments:**

    - `f`: F, of the working dtype of the operator.
    - `diagonal`: the diagonal of D, positive.
    - `from_entries`: whether F and D come from entries of A, from which its derivative is known.
    """
    own = jnp.arange(len(f), dtype=jnp.int32)[:, None]
    values = (1 / jnp.sqrt(diagonal))[:, None].astype(f.dtype)
    with any_promotion():
        whole = diagonal + jnp.sum(square_of(f), axis=1)
        return factors_of(f, own, values, whole, from_entries=from_entries)


def outside_of(u: Inexact[Array, "n r"], block: Inexact[Array, "n p"]) -> Inexact[Array, "n p"]:
    """(I - U U^H) times a block, orthogonal to U to rounding. Columns w get the length
    sqrt(n - r), so that E[w w^H] = I - U U^H if isotropic; zero columns stay 0.
    """
    for _ in range(2):
        block = block - matmul(u, matmul(adjoint(u), block))
    length = jnp.sqrt(square_norms(block))
    wanted = math.sqrt(u.shape[0] - u.shape[1])  # 0: nothing is outside of U
    return block * (wanted / jnp.where(length > 0, length, 1)).astype(block.dtype)


def diagonal_preconditioner(
    operator: lx.AbstractLinearOperator,
    diagonal: Real[Array, " n"] | None = None,
    floor: Real[Array, ""] | None = None,
) -> "BuiltPreconditioner":
    """P = D for a diagonal operator, or no preconditioner: the identity."""
    block = BlockOperator(operator)
    known = diagonal is not None
    d = diagonal if known else jnp.ones(block.n, jnp.finfo(block.dtype).dtype)
    f = jnp.zeros((block.n, 0), block.dtype)
    factors = low_rank_plus_diagonal(f, jnp.where(d > 0, d, 1), from_entries=known)
    if not known:  # P tells nothing of the size of A
        nothing = jnp.zeros_like(factors.top)
        factors = eqx.tree_at(lambda x: (x.row, x.top), factors, (nothing, nothing))
    return BuiltPreconditioner(factors, jnp.full((), known, d.dtype), floor=floor)


def _sizes(f: Array, root: Array, diagonal: Array) -> tuple[Array, Array]:
    """Returns (largest row, largest eigenvalue) of A in units of `root` (see `Factors`),
    from products of F F^H with a few vectors.
    """
    scaled = f / root[:, None].astype(f.dtype)
    probes = math.sqrt(len(f)) * generic(len(f), 8, f.dtype)
    products = matmul(scaled, matmul(adjoint(scaled), probes))
    own = jnp.max(diagonal / jnp.square(root))
    row = jnp.sqrt(jnp.max(jnp.mean(square_of(products), axis=1)))
    unit = scale_of(products)
    again = matmul(scaled, matmul(adjoint(scaled), products / unit))
    top = jnp.sqrt(jnp.max(square_norms(again) / jnp.maximum(square_norms(products / unit), 1e-30)))
    return jnp.maximum(row, own), jnp.maximum(top, own)


@final
class BuiltPreconditioner(eqx.Module):
    """A preconditioner from the method `build` of [`traceax.KernelPreconditioner`][] or
    [`traceax.NystromPreconditioner`][].

    As the `preconditioner` of [`traceax.logdet`][] and [`traceax.gaussian_log_density`][] it makes
    the value, for a given key, a smooth function of the operator, and the derivative exactly that
    of this function. From entries, pivots and neighbourhoods are held, and the values of P follow
    the operator; from products, P stays as it is, and works best for operators close to the one
    that it was built for.

    It fits operators with as many rows and the same working dtype. It is a PyTree of arrays, with
    `n x rank` numbers: an argument of jitted functions, which `vmap` may batch. No derivative flows
    into it.

    **Attributes:**

    - `factors`: the preconditioner, by products.
    - `control_variate_weight`: 1 for P = A, and 0 if P leaves out far more than the smallest
        eigenvalue.
    - `evidence`: whether the products that it was built from are those of a definite matrix.
    - `structure`: pivots and neighbourhoods, if the values follow the operator.
    - `floor`: a lower bound of the eigenvalues of $P^{-1} A$, for the operator A that it was built
        for; 0 or None if no bound is known.
    """

    factors: Factors
    control_variate_weight: Real[Array, ""]
    evidence: Evidence = eqx.field(default_factory=Evidence)
    structure: Any = None
    floor: Real[Array, ""] | None = None

    def factors_at(self, operator: lx.AbstractLinearOperator, moving: bool = False) -> Factors:
        """The preconditioner of this operator: see above. If it is `moving` with the operator, it
        has a first derivative.
        """
        return self.factors if self.structure is None else self.structure.factors(operator, moving)

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

        **Returns:** a `lineax.FunctionLinearOperator`.

        **Raises:** `ValueError` for a structure with another number of entries, or another dtype.
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
