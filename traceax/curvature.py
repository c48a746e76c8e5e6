r"""Curvature of functions of parameters, as lineax operators over the parameter PyTree.

Each function here returns a square, symmetric `lineax.AbstractLinearOperator` for
[`traceax.trace`][], [`traceax.diagonal`][] and the other functions. The input and output structure
of the operator is that of the parameters. Leaves that are not floating-point arrays (integers,
flags, activation functions) are held constant, and are `None` in that structure.

*Products.* Let the function be `L(f(params))`, of which `f` is linearised. Every product is

    A v = J^T (H_L) J v,     J the Jacobian of f, H_L the Hessian of L at f(params),

matrix-free and forward-over-reverse, and costs about as much as three to five evaluations of the
function. Everything that does not depend on v is computed once for all products.

*Batches.* With `batches`, the operator is the mean over slices along their leading axis. The slices
are accumulated by `lax.scan`, so that the memory is that of one batch.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from ._operators.curvature import (
    CurvatureOperator as CurvatureOperator,
    check_arrays,
    check_scalar,
    make_curvature,
    split_params,
)
from ._probes.random import numbered, split


def _half_square(outputs: Any, scale: float = 1.0) -> Array:
    """Half the squared norm times `scale`, whose Hessian is `scale` times the identity."""
    squares = [jnp.sum(jnp.real(x * jnp.conj(x))) for x in jtu.tree_leaves(outputs)]
    with jax.numpy_dtype_promotion("standard"):
        return 0.5 * scale * jnp.asarray(sum(squares))


def _constant(tree: Any) -> Any:
    return jtu.tree_map(lambda x: lax.stop_gradient(x) if eqx.is_array(x) else x, tree)


def hessian(
    loss: Callable[..., Inexact[Array, ""]], params: PyTree, *args: Any, batches: PyTree = None
) -> CurvatureOperator:
    r"""The Hessian $\nabla^2 L$ of a loss with respect to its parameters.

    !!! Example

        ```python
        operator = tr.curvature.hessian(loss, params, inputs, targets)
        solution = tr.trace(jax.random.key(0), operator, k=50)
        ```

    **Arguments:**

    - `loss`: called as `loss(params, *args)`, or `loss(params, batch, *args)` with batches;
        returns a scalar.
    - `params`: a PyTree, real. Leaves that are not floating-point arrays are held constant.
    - `args`: further arguments, held constant.
    - `batches`: a PyTree of arrays with a leading axis of the same length. Each slice along it is
        a batch, and the Hessian is averaged over the batches. By default the data are in `args`.

    **Returns:**

    A lineax operator over the floating-point leaves of `params`, tagged symmetric. A product costs
    about four evaluations of the loss (a batch).

    **Raises:**

    - `ValueError`: for a loss that does not return a scalar, parameters without a floating-point
        array, complex parameters, or arrays in `batches` with leading axes of different lengths.

    ??? cite "References"

        B. A. Pearlmutter, *Fast exact multiplication by the Hessian*, 1994,
        doi:10.1162/neco.1994.6.1.147.
    """

    def outer(params, constant, data):
        return check_scalar("The loss", loss(eqx.combine(params, constant), *data))

    # J is the identity: the parameters themselves are the outputs.
    def inner(index, params, *data):
        return eqx.filter(params, eqx.is_inexact_array)

    _, constant = split_params(params)
    return make_curvature(
        inner, lambda out, *data: outer(out, constant, data), params, args, batches
    )


def gauss_newton(
    predict: Callable[..., PyTree],
    loss: Callable[..., Inexact[Array, ""]],
    params: PyTree,
    *args: Any,
    batches: PyTree = None,
    convex: bool = True,
) -> CurvatureOperator:
    r"""The (generalised) Gauss-Newton matrix $J^\top H_L J$ of a loss of predictions.

    This is the Hessian of `loss(predict(params))` with the predictions linearised in the
    parameters. For the mean of a cross entropy, or of half a squared error, it is the exact Fisher
    matrix.

    **Arguments:**

    - `predict`: called as `predict(params, *args)`, or `predict(params, batch, *args)` with
        batches; returns a PyTree of floating-point arrays.
    - `loss`: called as `loss(predictions, *args)`, or `loss(predictions, batch, *args)`; returns a
        scalar.
    - `params`: a PyTree, real. Leaves that are not floating-point arrays are held constant.
    - `args`: further arguments of both functions, held constant.
    - `batches`: as for [`traceax.curvature.hessian`][].
    - `convex`: whether the loss is convex in the predictions, as cross entropy and squared error
        are. The operator is then tagged positive semidefinite.

    **Returns:**

    A lineax operator over the floating-point leaves of `params`, tagged symmetric, and positive
    semidefinite if `convex`.

    **Raises:**

    - `ValueError`: as [`traceax.curvature.hessian`][], and for predictions that are not
        floating-point arrays.

    ??? cite "References"

        N. N. Schraudolph, *Fast curvature matrix-vector products for second-order gradient
        descent*, 2002, doi:10.1162/08997660260028683.
    """

    def inner(index, params, *data):
        return check_arrays("predict", predict(params, *data))

    def outer(out, *data):
        return check_scalar("The loss", loss(out, *data))

    tags = (lx.positive_semidefinite_tag,) if convex else ()
    return make_curvature(inner, outer, params, args, batches, *tags)


def fisher(
    log_likelihood: Callable[..., Inexact[Array, " examples"]],
    params: PyTree,
    *args: Any,
    batches: PyTree = None,
    sample: Callable[..., tuple[Any, ...]] | None = None,
    key: PRNGKeyArray | None = None,
    num_samples: int = 1,
) -> CurvatureOperator:
    r"""The Fisher information matrix $\frac{1}{N} \sum_i g_i g_i^\top$ of N examples, where $g_i$
    is the gradient of the log-likelihood of the i-th example.

    Without `sample` it is the *empirical* matrix, with the labels in the data. With `sample` it is
    a *Monte Carlo* estimate, with labels drawn from the model. The expectation of this estimate is
    the true Fisher matrix at the given inputs.

    !!! Example

        ```python
        def log_likelihood(params, inputs, labels):  # one number an example
            log_probs = jax.nn.log_softmax(predict(params, inputs))
            return jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]

        def sample(key, params, inputs, labels):
            return inputs, jax.random.categorical(key, predict(params, inputs))

        empirical = tr.curvature.fisher(log_likelihood, params, inputs, labels)
        monte_carlo = tr.curvature.fisher(
            log_likelihood, params, inputs, labels, sample=sample, key=jax.random.key(0)
        )
        ```

    **Arguments:**

    - `log_likelihood`: called as `log_likelihood(params, *args)`, or `log_likelihood(params, batch,
        *args)` with batches; returns the log-likelihood of every example, an array of shape `(N,)`
        (a scalar counts as one example). The sign does not matter.
    - `params`: a PyTree, real. Leaves that are not floating-point arrays are held constant.
    - `args`: further arguments, held constant.
    - `batches`: as for [`traceax.curvature.hessian`][].
    - `sample`: called as `sample(key, params, *args)`, or `sample(key, params, batch, *args)` with
        batches; returns the arguments after `params` as a tuple, with labels drawn from the model.
        By default the labels in the data are used.
    - `key`: a random key, for `sample`.
    - `num_samples`: how many times to draw the labels.

    **Returns:**

    A lineax operator over the floating-point leaves of `params`, tagged positive semidefinite. All
    products use the same labels, and hence the same matrix.

    **Raises:**

    - `ValueError`: as [`traceax.curvature.hessian`][]; for log-likelihoods with more than one axis;
        if only one of `sample` and `key` is given, or `num_samples < 1`.

    ??? cite "References"

        F. Kunstner, L. Balles, P. Hennig, *Limitations of the empirical Fisher approximation for
        natural gradient descent*, 2019, arXiv:1905.12558.
    """
    if (sample is None) != (key is None):
        raise ValueError(
            "A Monte Carlo Fisher matrix needs both `sample` and `key`, the empirical one neither; "
            f"got a sample of type {type(sample).__name__} and a key of type {type(key).__name__}."
        )
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(
            f"num_samples (draws for each example) must be a positive Python int, got "
            f"{num_samples!r}."
        )

    def values(params, *data):
        out = check_arrays("log_likelihood", log_likelihood(params, *data))
        if not eqx.is_array(out) or out.ndim > 1:
            raise ValueError(
                "log_likelihood must return one number an example, an array of shape (N,), got "
                f"{jax.eval_shape(lambda: out)}. Do not sum over the examples."
            )
        return out

    def inner(index, params, *data):
        if sample is None or key is None:
            return values(params, *data)
        draw = sample

        def drawn(key):
            fresh = draw(key, params, *data)
            if not isinstance(fresh, tuple) or len(fresh) != len(data):
                raise ValueError(
                    "sample must return the arguments after `params` as a tuple of "
                    f"{len(data)}, got {jtu.tree_structure(fresh)}."
                )
            return values(params, *_constant(fresh))

        return jax.vmap(drawn)(split(numbered(key, index), num_samples))

    def outer(out, *data):
        return _half_square(out, 1 / out.size)

    return make_curvature(inner, outer, params, args, batches, lx.positive_semidefinite_tag)


def jacobian_gram(
    fn: Callable[..., PyTree], params: PyTree, *args: Any, batches: PyTree = None
) -> CurvatureOperator:
    r"""The Gram matrix $J^\top J$ of the Jacobian of a function of the parameters.

    Its trace is $\|J\|_F^2$, the trace of the neural tangent kernel.

    **Arguments:**

    - `fn`: called as `fn(params, *args)`, or `fn(params, batch, *args)` with batches; returns a
        PyTree of floating-point arrays.
    - `params`: a PyTree, real. Leaves that are not floating-point arrays are held constant.
    - `args`: further arguments, held constant.
    - `batches`: as for [`traceax.curvature.hessian`][].

    **Returns:**

    A lineax operator over the floating-point leaves of `params`, tagged positive semidefinite.

    **Raises:**

    - `ValueError`: as [`traceax.curvature.hessian`][], and for outputs that are not floating-point
        arrays.
    """

    def inner(index, params, *data):
        return check_arrays("fn", fn(params, *data))

    def outer(out, *data):
        return _half_square(out)

    return make_curvature(inner, outer, params, args, batches, lx.positive_semidefinite_tag)
