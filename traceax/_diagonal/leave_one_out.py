"""The leave-one-out diagonal, shared by XDiag and XNysDiag.

In both, leaving probe i out takes l_i r_i^H from the low-rank part. The difference between A and
what remains of that part, applied to omega_i, is e_i l_i:

    d_i = diag(low rank) - l_i conj(r_i) + e_i conj(omega_i) l_i                  (entrywise)

    XDiag:    low rank = Q Q^H A, l_i = Q s_i, r_i = A^H Q s_i, e_i = (s_i^H R)_i
    XNysDiag: low rank = F F^H,   l_i = r_i = F q_i,            e_i = rho_i / sqrt(d_i)

With j held out as well, the plane of (l_i, l_j) is lost. With gamma and nu of that pair (see
`_sketch.leave_one_out`), let l_ij = (l_j - l_i gamma_ij) / nu_ij, and r_ij likewise. Because
(s_j^H R)_i = 0,

    D_ij = d_i - d_ij = l_ij conj(r_ij) + e_i conj(gamma_ij) / nu_ij conj(omega_i) l_ij.

The standard error of every entry follows from these as for traces.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._estimators.calibration import with_ties
from .._estimators.rows import Rows
from .._sketch.columns import Columns
from .._sketch.leave_one_out import Pairs, usable_covariance


class DiagonalParts(NamedTuple):
    """The pieces of a leave-one-out diagonal."""

    base: Inexact[Array, " n"]  # the diagonal of the low-rank part
    left: Inexact[Array, "n m"]  # l_i
    right: Inexact[Array, "n m"]  # r_i
    left_over: Inexact[Array, " m"]  # e_i
    omega: Inexact[Array, "n m"]
    pairs: Pairs
    columns: Columns


def diagonal_and_error(
    split: DiagonalParts, group: Rows, rounding: Real[Array, " g"]
) -> tuple[Inexact[Array, " g"], Real[Array, " g"]]:
    """The mean of the d_i and its standard error.

    **Arguments:**

    - `split`: the pieces.
    - `group`: adds up the rows of each group.
    - `rounding`: the standard error that rounding adds to each estimate, see `leave_one_out_error`.

    **Returns:**

    The estimate for every group, and its standard error. Cost: 10 n m^2 operations.
    """
    base, left, right, left_over, omega, pairs, columns = split
    m = left.shape[1]
    probes = jnp.conj(omega)
    corrections = group(left_over * probes * left - left * jnp.conj(right))
    value = group(base[:, None])[:, 0] + columns.mean(corrections)
    if m == 1:
        return value, jnp.full_like(value.real, jnp.inf)

    root = jnp.sqrt(pairs.square)

    def held_out(l_i, r_i, omega_i, e_i, l_j, r_j, gamma, nu):
        # D_ij with i fixed and j along the columns, or the other way round.
        l_ij = (l_j - l_i * gamma) / nu
        r_ij = (r_j - r_i * gamma) / nu
        return l_ij * jnp.conj(r_ij) + e_i * (jnp.conj(gamma) / nu) * omega_i * l_ij

    def add(i, total):
        def column(x):
            return lax.dynamic_slice_in_dim(x, i, 1, axis=1)

        gamma, nu, valid = pairs.gamma[i], root[i], pairs.valid[i]
        ours = held_out(
            column(left), column(right), column(probes), left_over[i], left, right, gamma, nu
        )
        # gamma_ji = conj(gamma_ij), and the roles of i and j exchanged.
        theirs = held_out(
            left, right, probes, left_over, column(left), column(right), jnp.conj(gamma), nu
        )
        product = (group(ours) * jnp.conj(group(theirs))).real
        return total + jnp.sum(jnp.where(valid, product, jnp.zeros_like(product)), axis=1)

    # No columns are in use behind the last one.
    last = m if columns.inside is None else jnp.max(jnp.where(columns.inside, jnp.arange(m), 0)) + 1
    covariance = lax.fori_loop(0, last, add, jnp.zeros_like(value.real))
    number = columns.pairs(value.real.dtype)
    deviation = columns.only(corrections - columns.mean(corrections)[:, None])
    variance = jnp.sum(jnp.abs(deviation) ** 2, axis=1) / number  # of the mean
    square = jnp.square(rounding)
    covariance = usable_covariance(covariance, jnp.sum(variance), jnp.sum(square), columns)
    std_err = jnp.sqrt(variance + covariance / number + square)
    if group.sizes is None:
        std_err = with_ties(std_err, columns.used)
    return value, jnp.where(columns.used > 1, std_err, jnp.inf)
