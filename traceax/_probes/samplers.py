"""Distributions of random test vectors ("probes") with E[omega omega^H] = I."""

import abc
import math
from collections.abc import Sequence
from typing import Any, ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from equinox import AbstractClassVar, AbstractVar
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact, PRNGKeyArray, Shaped

from .random import random_bits, split

#: Barriers keep XLA from drawing numbers anew for each expression that reads them. Before JAX 0.12
#: XLA drops them too early for that, and holds one block more.
_BARRIERS_STAND = jax.__version_info__ >= (0, 12)


def _canonical(dtype: DTypeLike | None) -> Any:
    # The scalar type rather than the dtype: in NumPy `np.dtype("float64") == None` is true, so that
    # samplers with and without a dtype would be equal as keys of a compilation cache.
    return None if dtype is None else jax.dtypes.canonicalize_dtype(dtype).type


class AbstractSampler(eqx.Module):
    r"""A distribution of probes: random vectors $\omega$ with $E[\omega \omega^*] = I$.

    A call `sampler(key, n, k)` returns `k` independent probes as the columns of an array of shape
    `(n, k)`. A subclass is final; it declares `rotation_invariant`, and implements `_sample`.
    """

    dtype: AbstractVar[np.dtype | None]

    #: Whether `U omega` has the distribution of `omega` for every unitary `U`. Only then can a
    #: residual probe be renormalised ("resphered") without bias.
    rotation_invariant: AbstractClassVar[bool]

    #: Whether the entries are independent phases, of complex numbers of modulus 1, whatever the
    #: dtype. Then `omega^H A omega` has the variance `sum_{i != j} |A_ij|^2`, as for complex probes
    #: on the sphere, rather than twice as much.
    independent_phases: ClassVar[bool] = False

    #: The kinds of dtypes in which the distribution has a meaning.
    kinds: ClassVar[tuple[type, ...]] = jnp.inexact, jnp.signedinteger

    def __check_init__(self):
        if self.dtype is not None:
            self._check_kind(np.dtype(self.dtype))

    @abc.abstractmethod
    def _sample(
        self, key: PRNGKeyArray, shape: tuple[int, ...], k: int, dtype: np.dtype
    ) -> Shaped[Array, "*shape k"]:
        """`k` probes with the entries of a leaf of this shape, drawn in this shape, not along one
        long axis: a leaf that is cut along any axis stays on its devices.
        """

    def __call__(
        self, key: PRNGKeyArray, n: int, k: int, dtype: DTypeLike | None = None
    ) -> Shaped[Array, "n k"]:
        """Draw `k` probes of size `n`.

        **Arguments:**

        - `key`: a JAX random key.
        - `n`: the size of one probe.
        - `k`: the number of probes.
        - `dtype`: that of the probes, unless the sampler has one; by default JAX's floating dtype.

        **Returns:** an array of shape `(n, k)`, one probe a column.

        **Raises:** `ValueError` if the distribution has no meaning in this dtype.
        """
        chosen = self.dtype if self.dtype is not None else _canonical(dtype)
        if chosen is None:
            chosen = _canonical(self._default_dtype())
        self._check_kind(np.dtype(chosen))
        return self._sample(key, (n,), k, np.dtype(chosen))

    def _default_dtype(self) -> DTypeLike:
        return float

    def probes(self, key: PRNGKeyArray, n: int, k: int, dtype: np.dtype) -> Inexact[Array, "n k"]:
        """Probes as from a call of the sampler, converted to the (working) dtype of an operator."""
        return self(key, n, k, dtype).astype(dtype)

    def probes_by_leaf(
        self, key: PRNGKeyArray, shapes: Sequence[tuple[int, ...]], k: int, dtype: np.dtype
    ) -> list[Inexact[Array, "*shape k"]]:
        """Probes leaf by leaf: independent blocks of rows, of shape `(*shape, k)`, which together
        make up `k` whole probes. A single leaf has the numbers that `probes` returns.
        """
        keys = [key] if len(shapes) == 1 else split(key, len(shapes))
        own = np.dtype(dtype if self.dtype is None else self.dtype)
        pairs = zip(keys, shapes, strict=True)
        return [self._sample(key, shape, k, own).astype(dtype) for key, shape in pairs]

    def respheres(self, improved: bool | None, dtype: np.dtype) -> bool:
        """Whether residual probes are renormalised for an operator of this dtype.

        This requires a distribution that is invariant under the unitary group of the operator's
        field: real Gaussian vectors are not invariant under complex rotations. `improved` is the
        user's argument; None renormalises wherever that is unbiased.
        """
        is_real = self.dtype is not None and not jnp.issubdtype(self.dtype, jnp.complexfloating)
        smaller_group = is_real and jnp.issubdtype(dtype, jnp.complexfloating)
        return improved is not False and self.rotation_invariant and not smaller_group

    def check_dtype(self, dtype: np.dtype, improved: bool | None = None) -> None:
        """Refuse probes that do not fit an operator of this dtype."""
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        own = np.dtype(dtype if self.dtype is None else self.dtype)
        if jnp.issubdtype(own, jnp.complexfloating) and not is_complex:
            raise ValueError(
                f"{type(self).__name__} draws {own} probes, but the operator is {dtype}: a real "
                "operator needs real probes. Make the sampler without a dtype (it then follows "
                "the operator)."
            )
        self._check_kind(own)
        if improved and not self.respheres(improved, dtype):
            raise ValueError(
                f"improved=True renormalises residual probes, which is biased for {own} probes of "
                f"{type(self).__name__} and a {dtype} operator: they are not rotation invariant "
                "there. Use SphereSampler() or NormalSampler(), of no real dtype if A is complex, "
                "or improved=False."
            )

    def _check_kind(self, dtype: np.dtype) -> None:
        """Refuse a dtype in which the distribution has no meaning."""
        if not any(jnp.issubdtype(dtype, kind) for kind in self.kinds):
            kinds = " or ".join(kind.__name__ for kind in self.kinds)
            raise ValueError(
                f"{type(self).__name__} needs a dtype that is {kinds}, got {dtype}. Leave the "
                "dtype out to follow the operator; for a real one use RademacherSampler()."
            )


def _normal(
    key: PRNGKeyArray, shape: tuple[int, ...], k: int, dtype: np.dtype
) -> Inexact[Array, "k ..."]:
    """Standard normal numbers. Those of short dtypes are rounded: numbers that are drawn in
    bfloat16 have 128 different sizes.
    """
    wide = np.promote_types(dtype, np.float32)
    # The number of the vector comes first, as XLA does not vectorise over a short last axis.
    numbers = jr.normal(key, (k, *shape), wide).astype(dtype)
    return lax.optimization_barrier(numbers) if _BARRIERS_STAND else numbers


@final
class NormalSampler(AbstractSampler):
    r"""Standard normal probes: real $N(0, 1)$ entries, or circular complex ones with
    $E|\omega_i|^2 = 1$.

    Rotation invariant. Cost: `n k` normal numbers.

    **Arguments:**

    - `dtype`: a floating or complex dtype. By default the operator's.
    """

    dtype: np.dtype | None = eqx.field(converter=_canonical, default=None, static=True)
    rotation_invariant: ClassVar[bool] = True
    kinds = (jnp.inexact,)

    def _sample(self, key, shape, k, dtype):
        return jnp.moveaxis(_normal(key, shape, k, dtype), 0, -1)


@final
class SphereSampler(AbstractSampler):
    r"""Probes uniform on the sphere of radius $\sqrt{n}$, real or complex.

    Rotation invariant, and with less variance than normal probes. Cost: `n k` normal numbers.

    **Arguments:**

    - `dtype`: a floating or complex dtype. By default the operator's.
    """

    dtype: np.dtype | None = eqx.field(converter=_canonical, default=None, static=True)
    rotation_invariant: ClassVar[bool] = True
    kinds = (jnp.inexact,)

    def _sample(self, key, shape, k, dtype):
        vectors = _normal(key, shape, k, dtype)
        square = (vectors * jnp.conj(vectors)).real
        norm = jnp.sqrt(jnp.sum(square, axis=tuple(range(1, vectors.ndim)), keepdims=True))
        # A factor for each vector, rather than a division of the block: XLA then fuses one pass.
        scale = math.sqrt(math.prod(shape)) / norm
        # Without a barrier XLA would keep the numbers before scaling as well, and scale them anew
        # for each of their uses.
        scaled = lax.optimization_barrier(vectors * scale.astype(dtype))
        return jnp.moveaxis(scaled, 0, -1)


@final
class RademacherSampler(AbstractSampler):
    r"""Probes with independent entries $\pm 1$, each with probability one half.

    Not rotation invariant. Among real probes with independent entries these give Hutchinson's
    estimator the least variance: none comes from the diagonal. Cost: `n k` random bits.

    **Arguments:**

    - `dtype`: any numeric dtype that has a -1. By default the operator's.
    """

    dtype: np.dtype | None = eqx.field(converter=_canonical, default=None, static=True)
    rotation_invariant: ClassVar[bool] = False

    def _sample(self, key, shape, k, dtype):
        signs = 2 * random_bits(key, shape, k).astype(jnp.int32) - 1
        return signs.astype(dtype)


@final
class SteinhausSampler(AbstractSampler):
    r"""Probes with independent entries $e^{i\theta}$, $\theta$ uniform: the complex counterpart of
    Rademacher signs.

    Not rotation invariant. For a Hermitian operator a sample $z^* A z$ has the variance
    $\sum_{i \ne j} |A_{ij}|^2$. With Rademacher probes it is $2 \sum_{i \ne j} (\Re A_{ij})^2$:
    twice as much if the entries are real. Cost: `n k` uniform numbers.

    **Arguments:**

    - `dtype`: a complex dtype. By default the operator's, which must be complex.
    """

    dtype: np.dtype | None = eqx.field(converter=_canonical, default=None, static=True)
    rotation_invariant: ClassVar[bool] = False
    independent_phases: ClassVar[bool] = True
    kinds = (jnp.complexfloating,)

    def _default_dtype(self):
        return complex

    def _sample(self, key, shape, k, dtype):
        real = jnp.finfo(dtype).dtype
        angle = jr.uniform(key, (k, *shape), real, maxval=2 * np.pi)
        phases = lax.complex(jnp.cos(angle), jnp.sin(angle))
        return jnp.moveaxis(lax.optimization_barrier(phases), 0, -1)  # see `_normal`


def as_sampler(value: Any) -> Any:
    """A sampler, or None for a default; a `TypeError` for anything else."""
    if not isinstance(value, AbstractSampler | None):
        raise TypeError(
            f"The sampler must be one such as `traceax.NormalSampler()`, got {value!r}."
        )
    return value


def random_signs(dtype: np.dtype) -> AbstractSampler:
    """The distribution with independent entries of modulus 1, for operators of this dtype."""
    return SteinhausSampler() if jnp.issubdtype(dtype, jnp.complexfloating) else RademacherSampler()
