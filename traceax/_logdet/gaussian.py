"""The log density of a normal distribution: the function that users call."""

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Inexact, PRNGKeyArray, PyTree

from .._core.primitive import gaussian_log_density_p
from .._estimators.estimator import check_key, estimated
from .._estimators.solution import Solution
from .._operators.block_operator import BlockOperator, unflatten
from .._operators.checks import as_operator
from .factors import BuiltPreconditioner
from .gaussian_estimator import GaussianEstimator
from .preconditioners import AbstractPreconditioner
from .run import fields_and_budget


def _flat(y: Any, operator: lx.AbstractLinearOperator) -> tuple[Inexact[Array, "n t"], bool]:
    """Returns (the observations Y as columns of the working dtype, whether `y` is one vector
    without a last axis for several); or a `ValueError` that says what is wrong.
    """
    structure = operator.in_structure()
    block = BlockOperator(operator)
    leaves = [jnp.asarray(leaf) for leaf in jtu.tree_leaves(y)]
    fits = jtu.tree_structure(y) == jtu.tree_structure(structure)
    found = [leaf.shape for leaf in leaves]
    # Several vectors have the same last axis in all leaves.
    last = {shape[-1:] for shape in found}
    several = fits and len(last) == 1 and [shape[:-1] for shape in found] == block.shapes
    several = several and last != {()} and last != {(0,)}
    if not several and not (fits and found == block.shapes):
        raise ValueError(
            f"The observations y must look like the operator's input, {structure}, or have one "
            "more axis at the end of every leaf, for several vectors; their shape is "
            f"{jtu.tree_map(jnp.shape, y)}. If the vectors are rows, pass `y.T`."
        )
    real = not jnp.issubdtype(block.dtype, jnp.complexfloating)
    if real and any(jnp.iscomplexobj(leaf) for leaf in leaves):
        raise ValueError(
            f"The observations y are complex, but the operator is real ({block.dtype}). Declare "
            "the operator's input structure complex, or pass `y.real`."
        )
    t = found[0][-1] if several else 1
    rows = [leaf.reshape(-1, t).astype(block.dtype) for leaf in leaves]
    return jnp.concatenate(rows), not several


def gaussian_log_density(
    key: PRNGKeyArray,
    y: PyTree[ArrayLike],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    max_k: int | None = None,
    preconditioner: AbstractPreconditioner | BuiltPreconditioner | Literal["auto"] | None = "auto",
    fallback: Literal["exact"] | None = "exact",
    throw: bool = False,
) -> Solution:
    r"""Estimate the log density of the normal distribution $N(0, A)$ at $y$,

    $$\log N(y; 0, A) = -\tfrac{1}{2} \left(y^\top A^{-1} y + \log\det A + n \log 2\pi\right),$$

    such as the marginal likelihood of a Gaussian process; for complex $A$ (circular) twice this,
    with $\pi$ for $2 \pi$. Log densities of several vectors are added. Conjugate gradients solve
    for $A^{-1} y$. Derivatives are those of [`traceax.logdet`][].

    **Cost:** that of [`traceax.logdet`][].

    **Arguments:**

    - `key`, `operator`, `rtol`, `atol`, `max_k`, `preconditioner`, `fallback`, `throw`: as for
        [`traceax.logdet`][].
    - `y`: the observations, with the structure of the operator's input: an array of shape `(n,)`,
        or a PyTree. Several vectors have one more axis, the last one of every leaf.
    - `k`: the budget of matvecs. Less than `2 t + 2`, for t vectors, is raised to that.

    **Returns:** a [`traceax.Solution`][] as that of [`traceax.logdet`][]. Its `quadrature_error`
    includes the error of the solve. `stats` has (without derivatives) `"log_det"`,
    `"quadratic_form"` ($y^* A^{-1} y$; of shape `(t,)` for several vectors) and `"solve"` ($A^{-1}
    y$, with the structure of `y`).

    **Raises:** `TypeError`, `ValueError`: for arguments that do not fit.

    **Source:** J. Wenger et al., 2022, arXiv:2107.00243.
    """
    check_key(key)  # first: of a call without one, all arguments are off by one
    operator = as_operator(operator)
    observed, alone = _flat(y, operator)
    given = "gaussian_log_density", operator, k, preconditioner, fallback
    fields, k = fields_and_budget(*given, {"rtol": rtol, "atol": atol, "max_k": max_k})
    estimator = GaussianEstimator(*fields, observed)
    solution = estimated(gaussian_log_density_p, key, operator, k, estimator, throw=throw)
    log_det, form, x = solution.aux
    shaped = jax.vmap(partial(unflatten, operator.in_structure()), -1, -1)
    of_columns = {"quadratic_form": form, "solve": shaped(x)}
    if alone:
        of_columns = jtu.tree_map(lambda x: x[..., 0], of_columns)
    stats = {**solution.stats, "log_det": log_det, **of_columns}
    return dataclasses.replace(solution, stats=stats, aux=None)
