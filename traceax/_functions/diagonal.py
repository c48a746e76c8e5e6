r"""Diagonals of f(A), of a Hermitian A, by leaving out, as in `krylov_aware`.

b vectors omega_i of random signs and s steps of block Lanczos give a basis V, and T = V^H A V. Let
V_i be a basis of the Krylov space of all vectors but those of the group of omega_i, and T_i that of
A in it. V_i is within V, and independent of omega_i. Hence, with any number c_i that follows from
V_i and T_i,

    t_i = omega_i o (f(A) - L_i) omega_i + diag L_i,     L_i = V_i (f(T_i) - c_i) V_i^H,

has the mean diag f(A), and so has the mean of the t_i, which is the value. No further product is
made: f(A) omega_i ~ V f(T) V^H omega_i. Outside of V_i, f(A) is near the median of f in the
spectral measure of the vectors in V_i, which is c_i.

*The quadrature error* is that of f(A) omega_i: the values after s, s - m and s - 2m steps are
compared, with m = s / 8 (see `quadrature_error`).

*The derivative* of an exact value is diag S (D o S^H dA S) S^H, with A = S Theta S^H and with the
divided differences D of f. An estimate has none.
"""

import math
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray, Real

from .._core.derivatives import constant
from .._core.estimate import rounding_of, safe_norm
from .._core.precision import adjoint, matmul, square_of
from .._core.primitive import spectral_diagonal_p
from .._estimators.estimator import AbstractEstimator, check_budget, check_either, estimated
from .._estimators.solution import Solution, restructure
from .._linalg.block_lanczos import block_lanczos
from .._linalg.factorisations import ritz_values
from .._operators.block_operator import BlockOperator
from .._probes.samplers import RademacherSampler
from .funm import (
    AbstractFunctionEstimator,
    hermitian_operator,
    hoist_function,
    spectrum,
    values_at_eigenvalues,
)
from .krylov_aware import GROUPS, INFLATION, projected, sizes_of, spaces_without_group
from .nodes import Function, divided_differences, on_nodes, within_tag
from .quadrature_error import (
    entries_std_err,
    entries_truncation_error,
    exact_estimate,
    quadrature_estimate,
)
from .tolerance import with_tolerance


@final
class SpectralDiagonalEstimator(AbstractFunctionEstimator):
    """The mean of the t_i, see above."""

    fn: Function

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        n = block.n
        eps = block.eps
        size, s, _ = sizes_of(k)
        b = GROUPS * size
        omega = RademacherSampler().probes(key, n, b, jnp.finfo(block.dtype).dtype)
        krylov = block_lanczos(block.mm, omega.astype(block.dtype), s, eps)
        basis = krylov.rows.T
        coordinates = matmul(adjoint(basis), omega)
        of_groups = coordinates.T.reshape(GROUPS, size, -1)
        rows = spaces_without_group(krylov.t, of_groups, s, eps)

        # f(A) omega after s, s - m and s - 2m steps.
        found = projected(self.fn, operator, krylov, b, eps)
        overlaps = matmul(jnp.conj(jnp.swapaxes(found.vectors, 1, 2)), coordinates)
        images = matmul(basis, matmul(found.vectors, found.values[:, :, None] * overlaps))
        entries = omega * images.real
        samples = entries[0] + self._corrections(operator, basis, rows, omega, krylov.t)
        error = entries_truncation_error(jnp.mean(entries, axis=2), krylov.exhausted)

        # How much of each node an entry sees: what is within V, and what is outside.
        ritz = square_of(matmul(basis, found.vectors[0]))
        room = jnp.maximum(1 - jnp.sum(ritz, axis=1), 0)
        masses = jnp.mean(square_of(overlaps), axis=2) / n
        error = error + room * matmul(masses[1], found.hidden)
        rounding = rounding_of(safe_norm(images[0]) / math.sqrt(b), eps)
        rounding = rounding + matmul(ritz + room[:, None] * masses[0], found.changes)
        std_err, _ = entries_std_err(samples.T, jnp.asarray(b, samples.dtype))
        errors = error, jnp.hypot(std_err, rounding)
        given = jnp.mean(samples, axis=1), *errors, b * s, b - 1, found.evidence
        return quadrature_estimate(*given, inflation=INFLATION), None

    def _corrections(
        self,
        operator: lx.AbstractLinearOperator,
        basis: Inexact[Array, "n m"],
        rows: Inexact[Array, "l r m"],
        omega: Real[Array, "n b"],
        t: Inexact[Array, "m m"],
    ) -> Real[Array, "n b"]:
        """The terms in L_i, diag L_i - omega_i o L_i omega_i; `rows` are bases of the spaces
        without each group, in coordinates of `basis`, which is V.
        """
        n, b = omega.shape
        eps = BlockOperator(operator).eps

        def of_group(rows, omega):
            """That of one group that is left out."""
            inner = matmul(matmul(jnp.conj(rows), t), rows.T)  # T_i
            in_use = jnp.any(rows != 0, axis=1)
            nodes, s = ritz_values((inner + adjoint(inner)) / 2, in_use)
            nodes = within_tag(operator, nodes, eps)
            values = on_nodes(self.fn, nodes, jnp.any(s != 0, axis=0))
            # The first rows belong to the vectors omega of the other groups: their squares are the
            # masses of the spectral measure, whose median of f is c_i.
            first_step = square_of(s[: len(omega.T) * (GROUPS - 1)])
            values = values - median(values, jnp.sum(first_step, axis=0))
            right = matmul(basis, matmul(rows.T, s))
            left = right * values
            diagonal = jnp.sum(left * jnp.conj(right), axis=1).real
            return diagonal[:, None] - omega * matmul(left, matmul(adjoint(right), omega)).real

        of_groups = omega.reshape(n, GROUPS, -1)
        return jax.vmap(of_group, (0, 1), 1)(rows, of_groups).reshape(n, b)

    def exact(self, operator):
        """See `AbstractEstimator`: by an eigendecomposition."""
        eps = BlockOperator(operator).eps
        nodes, basis, evidence = spectrum(operator)
        values, changes, evidence = values_at_eigenvalues(self.fn, operator, nodes, evidence)
        rounding = rounding_of(safe_norm(jnp.abs(basis) * values), eps)
        error = matmul(square_of(basis), changes) + rounding
        value = matmul(square_of(basis), values)
        return exact_estimate(value, error, nodes.size, evidence), (basis, nodes)

    def contract(self, weights, operator):
        """See `AbstractEstimator`: of the exact value, whose weights are (eigenvectors,
        eigenvalues). The leaves of `fn` have derivatives, too.
        """
        if weights is None:
            raise NotImplementedError(
                "The diagonal of a function has a derivative only where it is exact, for k >= n. "
                "Give such a budget, or hold the parameters constant: `jax.lax.stop_gradient`."
            )
        basis, nodes = weights
        inner = matmul(adjoint(basis), BlockOperator(operator).mm(basis))
        core = divided_differences(constant(self.fn), nodes[None])[0] * inner
        moved = jnp.sum(matmul(basis, core) * jnp.conj(basis), axis=1).real
        return moved + matmul(square_of(basis), on_nodes(self.fn, nodes))


def median(values: Real[Array, " m"], masses: Real[Array, " m"]) -> Real[Array, ""]:
    """The median of the values with these masses."""
    order = jnp.argsort(values)
    sums = jnp.cumsum(masses[order])
    return values[order][jnp.argmax(sums >= sums[-1] / 2)]


def spectral_diagonal(
    key: PRNGKeyArray,
    fn: Callable[[Array], Array],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: float | Array | None = None,
    atol: float | Array | None = None,
    max_k: int | None = None,
    throw: bool = False,
) -> Solution[Any]:
    r"""Estimate the diagonal of $f(A)$ of a Hermitian operator: subgraph centralities ($e^A$ of an
    adjacency matrix), leverage scores ($x / (x + s)$ of a kernel), and other numbers that every row
    has. For inverses of sparse or stored matrices, and of K + s I with K of low rank,
    [`traceax.inverse_diagonal`][] is better.

    Random signs build a block Krylov space, on which f(A) is known. A quarter of them in turn is
    left out, and tests what the space of the others leaves of f(A).

    **Cost:** at most `k` matvecs, in blocks; `k n` numbers; about `12 n k^2` operations. Exact
    values have first derivatives, also with respect to arrays in `fn`; estimates have none.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `fn`: a JAX function of one real number with real values, as for [`traceax.spectral_sum`][].
    - `operator`: a Hermitian lineax operator with `n` rows, between any PyTrees, with a tag.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `rtol`, `atol`, `max_k`: a tolerance in the place of a budget, as of [`traceax.diagonal`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:** a [`traceax.Solution`][] with two errors for every entry, `std_err` of the probes
    and `quadrature_error` of short recurrences; both and `value` have the structure of the
    operator's input PyTree, real. It is `outside_domain` and NaN where f is not finite at a Ritz
    value, and `not_converged` where the quadrature errors of all entries exceed four standard
    errors and 5 % of the value. Below some 24 products, recurrences may end too early and not show
    it.

    **Raises:** those of [`traceax.spectral_sum`][]; `NotImplementedError` for a derivative with
    `k < n`.
    """
    name = "The diagonal of a function"
    operator = hermitian_operator(operator, name)
    function = hoist_function(fn, jnp.finfo(BlockOperator(operator).dtype).dtype)
    estimator: AbstractEstimator = SpectralDiagonalEstimator(function)
    if check_either("spectral_diagonal", k, rtol, atol, max_k):
        given = estimator, operator, rtol, atol, max_k
        budget, estimator = with_tolerance("spectral_diagonal", *given)
    else:
        budget = check_budget(k, 8, operator.in_size(), name)
    solution = estimated(spectral_diagonal_p, key, operator, budget, estimator, throw=throw)
    return restructure(solution, operator.in_structure())
