"""Arithmetic independent of the user's settings: full precision (no TF32), any promotion."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, Real


def matmul(a: Array, b: Array) -> Array:
    """The product of two matrices (or stacks) in full precision, whatever the user's default is.

    **Arguments:**

    - `a`, `b`: arrays, as of `jax.numpy.matmul`.
    """
    # A real matrix multiplies two real ones: far faster on CPUs than two complex matrices.
    if jnp.iscomplexobj(b) and not jnp.iscomplexobj(a):
        return lax.complex(matmul(a, b.real), matmul(a, b.imag))
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def adjoint(a: Inexact[Array, "a b"]) -> Inexact[Array, "b a"]:
    """The conjugate transpose."""
    return jnp.conj(a.T)


def row_dots(a: Inexact[Array, "m n"], b: Inexact[Array, "m n"]) -> Inexact[Array, " m"]:
    """The inner products of corresponding rows, conjugate in the first."""
    return jnp.sum(jnp.conj(a) * b, axis=1)


def row_squares(a: Inexact[Array, "m n"]) -> Real[Array, " m"]:
    """The squared norms of the rows."""
    return jnp.sum(square_of(a), axis=1)


def column_dots(a: Inexact[Array, "n m"], b: Inexact[Array, "n m"]) -> Inexact[Array, " m"]:
    """The inner products a_i^H b_i of corresponding columns."""
    # Over the rows of the transpose: long vectors are stored as rows, and XLA would transpose them.
    return row_dots(a.T, b.T)


def square_norms(a: Inexact[Array, "n m"]) -> Real[Array, " m"]:
    """The squared norms of the columns."""
    return row_squares(a.T)  # see `column_dots`


def square_of(a: Inexact[Array, "..."]) -> Real[Array, "..."]:
    """The squared absolute values."""
    return jnp.square(a.real) + jnp.square(a.imag) if jnp.iscomplexobj(a) else jnp.square(a)


def at_least_single(dtype: Any) -> np.dtype:
    """The dtype, or float32 in place of half precision, in which long sums cease to grow."""
    return np.dtype(dtype if jnp.finfo(dtype).bits >= 32 else np.float32)


#: How many bits after the first one a factor of single precision keeps in a product of matrices: by
#: platform, for JAX's precisions. (Measured on a GPU; what TPUs do is in JAX's documentation.)
_BITS_ON = {"gpu": {"DEFAULT": 10, "HIGH": 10}, "tpu": {"DEFAULT": 7, "HIGH": 15}}

#: On all platforms, for the algorithms that can be asked for by name, and for factors of any dtype.
_BITS_IN = {"ANY": 2, "BF16": 7, "F16": 10, "TF32": 10, "F32": 23}

#: How many numbers of that kind stand for a factor, by the end of the name.
_PARTS_IN = {"X3": 2, "X6": 3, "X9": 3}


def platform() -> str:
    """Where programs run unless their arrays say otherwise: "cpu", "gpu" or "tpu"."""
    device = jax.config.values["jax_default_device"]
    name = getattr(device, "platform", device) or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else str(name)


def eps_of_factors(precision: Any, dtypes: Iterable[Any]) -> float:
    """The rounding of factors in a product of matrices, or 0. It exceeds that of float32 for single
    precision on GPUs (TF32) and TPUs (bfloat16), unless the user asks for the highest precision,
    and for any precision if the user asks for an algorithm that rounds.
    """
    single = any(dtype in (np.float32, np.complex64) for dtype in dtypes)
    coarse = _BITS_ON.get(platform(), {}) if single else {}
    worst = 0.0
    for each in precision if type(precision) is tuple else (precision,):
        words = getattr(each, "name", "DEFAULT").split("_")
        bits = _BITS_IN.get(words[0], coarse.get(words[0]))
        parts = _PARTS_IN.get(words[-1], 1)
        if hasattr(each, "lhs_precision_type"):  # an algorithm that is described, not named
            bits = jnp.finfo(each.lhs_precision_type).nmant
            parts = each.lhs_component_count
        if bits is not None:
            worst = max(worst, 2.0 ** -min(23, parts * (bits + 1) - 1))
    return worst


@contextmanager
def any_promotion() -> Iterator[None]:
    """A context in which arrays of any dtypes and ranks combine: real, complex, scalars, blocks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
