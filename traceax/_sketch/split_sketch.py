"""A basis from a sketch, and probes of their own for the rest: what Hutch++ and Diag++ share."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray

from .._core.estimate import scale_of
from .._operators.block_operator import BlockOperator
from .._probes.random import split
from .._probes.samplers import AbstractSampler
from .columns import Columns, all_columns


class SplitSketch(NamedTuple):
    """The basis and the residual probes, with their products; and the probes of the sketch with the
    sketch itself (without entries if they are not kept). Vectors are rows, see
    `AbstractExtendable`.
    """

    q: Inexact[Array, "m n"]
    z: Inexact[Array, "m n"]  # A Q, or A^H Q
    g: Inexact[Array, "m n"]  # residual probes
    products: Inexact[Array, "m n"]  # A G
    omega: Inexact[Array, "m kept"]
    sketch: Inexact[Array, "m kept"]  # A Omega

    def tested(self, columns: Columns) -> Columns:
        """The residual probes in use. (A fixed budget may have more of them than of the others.)"""
        return all_columns(self.g.shape[0]) if columns.inside is None else columns

    def others(self) -> tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]:
        """The vectors besides the basis that were multiplied, and their products."""
        vectors, products = (self.g, self.omega), (self.products, self.sketch)
        return jnp.concatenate(vectors).T, jnp.concatenate(products).T


def empty_split(growth: Any, block: BlockOperator, keeps: bool) -> SplitSketch:
    """The state without probes."""
    basis, kept = growth.empty(block), growth.empty(block, keeps)
    probes = jnp.zeros((growth.capacity + growth.rest, block.n), block.dtype)
    return SplitSketch(basis, basis, probes, probes, kept, kept)


def _probes(
    key: PRNGKeyArray, which: int, sampler: AbstractSampler, block: BlockOperator, number: int
) -> Inexact[Array, "m n"]:
    return sampler.probes(split(key)[which], block.n, number, block.dtype).T


def extend_split(
    state: SplitSketch, sampler: AbstractSampler, growth: Any, block: BlockOperator, keeps: bool
) -> SplitSketch:
    """Extend the basis by a further sketch, and draw further residual probes. What multiplies the
    new rows of `q` and of `g` is left to the algorithm.

    **Arguments:**

    - `state`: the state so far.
    - `sampler`: the distribution of the probes.
    - `growth`: the new probes, a `Growth`.
    - `block`: the operator.
    - `keeps`: whether the sketch is kept.

    **Returns:**

    The state, with products of its former vectors only. Cost: m matvecs for m new probes.
    """
    omega, sketch = state.omega, state.sketch
    if not keeps:
        omega = sketch = growth.empty(block)
    omega = growth.each(lambda key: _probes(key, 0, sampler, block, growth.width), omega)
    sketch = growth.multiply(block, block.mm, omega, sketch)
    scale = scale_of(sketch)
    # Scaled, so that the QR factorisation does not overflow. The basis stays the same.
    factor = growth.empty_factor(block)
    q, _ = growth.orthonormalise(state.q, factor, lambda rows: rows(sketch) / scale)
    fresh = growth.width + growth.rest
    g = growth.each(lambda key: _probes(key, 1, sampler, block, fresh), state.g)
    kept = (omega, sketch) if keeps else (state.omega, state.sketch)
    return SplitSketch(q, state.z, g, state.products, *kept)
