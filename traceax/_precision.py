"""Products in full precision, whatever the user's matmul setting is (TF32 on a GPU)."""

from functools import partial

import jax.numpy as jnp
from jax import lax

matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
