"""The log density of a normal distribution: the function that users call."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, ArrayLike, Inexact, PRNGKeyArray, PyTree

from .._core.primitive import gaussian_log_density_p
from .._estimators.estimator import solve
from .._estimators.solution import Solution
from .._operators.block_operator import BlockOperator, as_operator
from .._sketch.low_rank import BuiltPreconditioner
from .budget_policy import policy_of
from .fallback import budget_or_all, check_fallback, check_no_tolerance
from .gaussian_estimator import GaussianEstimator
from .held import HeldGaussianEstimator
from .preconditioners import AbstractPreconditioner


def _flat(y: Any, operator: lx.AbstractLinearOperator) -> tuple[Inexact[Array, "n t"], bool]:
    """The observations as columns of the working dtype, and whether there is one vector without an
    axis of its own; or an error that says what is wrong.
    """
    structure, dtype = operator.in_structure(), BlockOperator(operator).dtype
    if isinstance(y, list | tuple) and isinstance(structure, jax.ShapeDtypeStruct):
        raise TypeError(
            f"The observations y must be an array, got a {type(y).__name__}. Pass "
            "`jax.numpy.asarray(y)`."
        )
    leaves, shapes = jtu.tree_leaves(y), jtu.tree_map(jnp.shape, y)
    fits = jtu.tree_structure(y) == jtu.tree_structure(structure)
    wanted = [leaf.shape for leaf in jtu.tree_leaves(structure)]
    found = [jnp.shape(leaf) for leaf in leaves]
    # Several vectors have the same last axis in all leaves.
    last = {shape[-1:] for shape in found}
    several = fits and len(last) == 1 and [shape[:-1] for shape in found] == wanted
    several = several and last != {()} and last != {(0,)}
    if not several and not (fits and found == wanted):
        raise ValueError(
            f"The observations y must look like the operator's input, {structure}, or have one "
            "more axis at the end of every leaf, for several vectors; their shape is "
            f"{shapes}. If the vectors are rows, pass `y.T`."
        )
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    real = not jnp.issubdtype(dtype, jnp.complexfloating)
    if real and any(jnp.iscomplexobj(leaf) for leaf in leaves):
        raise ValueError(
            f"The observations y are complex, but the operator is real ({dtype}). Declare the "
            "operator's input structure complex, or pass `y.real`."
        )
    t = found[0][-1] if several else 1
    rows = [leaf.reshape(-1, t).astype(dtype) for leaf in leaves]
    return jnp.concatenate(rows), not several


def gaussian_log_density(
    key: PRNGKeyArray,
    y: PyTree[ArrayLike],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    atol: None = None,
    preconditioner: AbstractPreconditioner | BuiltPreconditioner | Literal["auto"] | None = "auto",
    fallback: Literal["exact"] | None = "exact",
    throw: bool = False,
) -> Solution:
    r"""Estimate the log density of the normal distribution $N(0, A)$ at $y$,

    $$\log N(y; 0, A) = -\tfrac{1}{2} \left(y^\top A^{-1} y + \log\det A + n \log 2\pi\right),$$

    such as the marginal likelihood of a Gaussian process, $A = K + s I$. For complex $A$
    it is the log density of the circular normal distribution,
    $-(y^* A^{-1} y + \log\det A + n \log \pi)$.

    *Several vectors* $y_1, \dots, y_t$, the columns of `y`, are independent draws, such as the
    outputs of a process with t independent outputs. The value is the sum of their log densities,

    $$-\tfrac{1}{2} \Big(\sum_j y_j^\top A^{-1} y_j + t \log\det A + t\, n \log 2\pi\Big),$$

    with one log-determinant. Its error is t times that of a single one. The solves share the
    products of a step, take $t / (t + 4)$ of the budget at most, and each ends by itself.

    The log-determinant is that of [`traceax.logdet`][], with at least four fifths of the budget
    (from `k = 10` on). The rest goes to a solve by conjugate gradients with the same
    preconditioner. The solve ends early if the preconditioner is good.

    By default the gradient is unbiased over the keys, which suits Adam and expectations. With a
    preconditioner that was built before (a [`traceax.BuiltPreconditioner`][]) the value, for a
    fixed key, is a smooth function of the hyperparameters and of `y`, and the gradient is exactly
    that of this function, which suits line searches (L-BFGS). All of the budget then goes to probes
    and steps, four fifths of it to the log-determinant. If the mean of the distribution is not
    zero, subtract it from `y`.

    !!! Example

        ```python
        kernel = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        covariance = kernel + noise * lx.IdentityLinearOperator(kernel.in_structure())
        solution = tr.gaussian_log_density(jax.random.key(0), y, covariance, k=120)
        solution.value, solution.std_err, solution.quadrature_error
        alpha = solution.stats["solve"]  # A^{-1} y: the posterior mean is K_* alpha
        ```

    Cost: at most `k` matvecs; memory and operations as for [`traceax.logdet`][]. First derivatives,
    with respect to what A depends on and to `y`, cost about as many tangent products (and `k` more
    products with a preconditioner that was built before). Second and higher derivatives are those
    of [`traceax.logdet`][].

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `y`: the observations, with the structure of the operator's input: an array of shape `(n,)`,
        or a PyTree. Several vectors have one more axis, the last one of every leaf: an array of
        shape `(n, t)`.
    - `operator`: the covariance, as for [`traceax.logdet`][].
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact. A
        budget below `2 t + 2` is raised to that.
    - `atol`: None. (A tolerance is not available yet.)
    - `preconditioner`: as for [`traceax.logdet`][].
    - `fallback`: as for [`traceax.logdet`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] with a real value. Its `quadrature_error` includes the error of the
    solve. `stats` has (without derivatives) `"log_det"`, `"quadratic_form"` ($y^* A^{-1} y$; an
    array of shape `(t,)` for several vectors) and `"solve"` ($A^{-1} y$, with the structure of
    `y`). The result is `outside_domain` or
    `not_symmetric`, and the value NaN, if the operator is found not to be positive definite to
    rounding, or not to be Hermitian, in the same way as by [`traceax.logdet`][]. It is
    `not_converged`, with the best estimate, if the quadrature error exceeds four standard errors,
    5 % of the value, and 1.

    **Raises:**

    - `TypeError`: for a key, operator, `k` or preconditioner of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged positive semidefinite,
        observations that do not fit it, `k < 1`, a preconditioner that cannot be built for it, or
        was built for one of another size or dtype, another `fallback`, or a tolerance.
    - `NotImplementedError`: for second derivatives with a preconditioner that was built before.

    ??? cite "References"

        J. Wenger et al., *Preconditioning for scalable Gaussian process hyperparameter
        optimization*, 2022, arXiv:2107.00243; and those of [`traceax.logdet`][].
    """
    check_fallback(fallback)
    check_no_tolerance(atol)
    if isinstance(y, lx.AbstractLinearOperator):
        raise TypeError(
            f"The observations y must be an array, got a {type(y).__name__}. The order is "
            "`gaussian_log_density(key, y, operator, k)`."
        )
    operator = as_operator(operator)
    observed, alone = _flat(y, operator)
    if isinstance(preconditioner, BuiltPreconditioner):
        estimator = HeldGaussianEstimator(observed, lax.stop_gradient(preconditioner))
    else:
        policy = policy_of(preconditioner)
        k = budget_or_all(operator, k, fallback if policy.auto else None)
        estimator = GaussianEstimator(observed, policy)
    solution = solve(gaussian_log_density_p, key, operator, k, estimator, throw=throw)
    value, error, log_det, form, x = solution.value
    std_err = solution.std_err[0]
    unflatten = BlockOperator(operator).unflatten
    if alone:
        form, unflat = form[0], unflatten(x[:, 0])
    else:
        unflat = jax.vmap(unflatten, -1, -1)(x)
    stats = {"log_det": log_det, "quadratic_form": form, "solve": unflat}
    stats = {**solution.stats, "std.err": std_err, **stats}
    return Solution(value, std_err, solution.num_matvecs, stats, solution.result, error)
