"""The LAPACK calls, all in one place.

jaxlib runs a *batched* LAPACK call in parallel on XLA's own thread pool, and blocks one of the
threads meanwhile. Two such calls that do not depend on each other then deadlock a pool of two
threads (seen with jaxlib 0.10.2 on two cores: `dtrsm` beside `dorgqr`, both vmapped). Under
`vmap` on a CPU the calls are therefore made one after the other, by a loop over the batch. Other
platforms batch them as usual.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Inexact


def _one_by_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, looped over a batch on CPUs."""
    looped = sequential_vmap(fn)

    @wraps(fn)
    def dispatch(*args):
        return jax.lax.platform_dependent(*args, cpu=looped, default=fn)

    return dispatch


@_one_by_one
def qr(block: Inexact[Array, "n m"]) -> tuple[Inexact[Array, "n m"], Inexact[Array, "m m"]]:
    """The reduced QR factorisation."""
    q, r = jnp.linalg.qr(block)
    return q, r


@_one_by_one
def cholesky(h: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The upper factor C of a Hermitian H = C^H C; NaN where it has none."""
    return jnp.linalg.cholesky(h, upper=True)


@_one_by_one
def solve_upper_adjoint(
    r: Inexact[Array, "m m"], b: Inexact[Array, "m p"]
) -> Inexact[Array, "m p"]:
    """R^{-H} B for an upper triangular R."""
    return jsl.solve_triangular(r, b, trans="C", lower=False)


@_one_by_one
def divide_by_upper(f: Inexact[Array, "n m"], r: Inexact[Array, "m m"]) -> Inexact[Array, "n m"]:
    """F R^{-1} for an upper triangular R."""
    return jsl.solve_triangular(r, f.T, trans="T", lower=False).T
