r"""The operator behind `traceax.curvature`, and the checks of its arguments.

Let `inner` map parameters to outputs, with the Jacobian J, and `outer` outputs to a scalar, with
the Hessian H. A product is

    A v = J^T H J v,

forward-over-reverse. Everything that does not depend on v is computed once for all products.

A quadratic form needs no product and no reverse pass. With u = J v it is

    v^T A v = u^T H u = d^2/dt^2 outer(inner + t u) at t = 0,

forward-over-forward, in about half the time, and in the memory of v and of the activations.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, PyTree

from .._core.precision import at_least_single
from .._core.programs import closed_function
from .parameters import structure_of
from .precision import eps_along, product_precision
from .tags import register_tags


@final
class CurvatureOperator(lx.AbstractLinearOperator):
    """A curvature matrix, averaged over batches. The functions of `traceax.curvature` make it."""

    # (params, (index, batch), vector, (constant, args)) -> A vector, closure-converted
    product: Callable[..., Any]
    form: Callable[..., Any] | None  # the same for the number v^T A v; None: `product` gives it
    params: PyTree[Inexact[Array, "..."]]
    arrays: PyTree[Array]  # those that are held constant: among the parameters, and in `args`
    batches: PyTree[Array]  # None: the data are in `args`, or inside `product`
    weights: Array | None  # of the batches; None: all the same
    tags: frozenset[object] = eqx.field(static=True)
    # The relative precision of a product, where the dtypes of the parameters do not show it.
    precision: float | None = eqx.field(default=None, static=True)
    differences: bool = eqx.field(default=False, static=True)  # of gradients: see `hessian`

    def mv(self, vector: PyTree[Inexact[Array, "..."]]) -> PyTree[Inexact[Array, "..."]]:
        """The product with a vector: a PyTree like the parameters, of their shapes and dtypes."""
        return self.mean(self.product, vector)

    def mean(self, fn: Callable[..., Any], vector: Any) -> Any:
        """The mean over batches of `fn(params, (index, batch), vector, arrays)`."""
        if self.batches is None:
            return fn(self.params, (jnp.asarray(0), None), vector, self.arrays)
        count = jtu.tree_leaves(self.batches)[0].shape[0]
        indexed = (jnp.arange(count), self.batches)
        weights = jnp.ones(count) if self.weights is None else self.weights
        # Another batch stands in for one of weight 0: the derivative by this weight is NaN.
        weights = jnp.where(weights == 0, jnp.sqrt(jnp.square(weights)), weights)
        # Divided first by the largest, because the sum may overflow.
        shares = weights / lax.stop_gradient(jnp.max(jnp.abs(weights)))
        shares = count * shares / jnp.sum(shares)
        counted = jtu.tree_map(lambda x: x[jnp.argmax(weights != 0)], indexed)
        # Half precision is widened outside of the loop, and narrowed inside: a batch reads the same
        # numbers; but in reverse mode the cotangents of the batches are added in float32.
        given = self.params, vector, self.arrays
        floating, others = eqx.partition(given, eqx.is_inexact_array)
        wide = jtu.tree_map(lambda x: x.astype(at_least_single(x.dtype)), floating)

        # Reverse mode evaluates a batch again, rather than keeping the activations of all batches.
        @jax.checkpoint
        def one_batch(indexed):
            narrow = jtu.tree_map(lambda x, like: x.astype(like.dtype), wide, floating)
            params, vector, arrays = eqx.combine(narrow, others)
            return fn(params, indexed, vector, arrays)

        def add(total, batch_and_share):
            indexed, share = batch_and_share
            # A batch of weight 0 may be padding, of which even NaN does not count. It is not even
            # evaluated, since the derivative there would be NaN times 0.
            indexed = jtu.tree_map(lambda x, y: jnp.where(share == 0, y, x), indexed, counted)
            terms = one_batch(indexed)
            return jtu.tree_map(
                lambda t, x: t + share.astype(t.dtype) * x.astype(t.dtype), total, terms
            ), None

        # A sum of many terms in half precision ceases to grow.
        structure = jax.eval_shape(one_batch, counted)
        zero = jtu.tree_map(lambda x: jnp.zeros(x.shape, at_least_single(x.dtype)), structure)
        total, _ = lax.scan(add, zero, (indexed, shares))
        return jtu.tree_map(lambda x, like: (x / count).astype(like.dtype), total, structure)

    def as_function(self) -> lx.FunctionLinearOperator:
        """The same operator as one of lineax's."""
        return lx.FunctionLinearOperator(self.mv, self.in_structure(), self.tags)

    def as_matrix(self) -> Inexact[Array, "n n"]:
        """The dense matrix, by `n` products."""
        return self.as_function().as_matrix()

    def transpose(self) -> "CurvatureOperator":
        """The operator itself: it is symmetric."""
        return self

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The structure of the parameters that are differentiated."""
        return structure_of(self.params)

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The structure of a product: that of the parameters."""
        return self.in_structure()


@lx.linearise.register(CurvatureOperator)
def _(operator):
    if operator.batches is not None or operator.differences:
        # A linearisation would hold the activations of all batches; of a difference of gradients
        # it would be the second derivative that does not exist.
        return operator
    origin = jtu.tree_map(jnp.zeros_like, operator.params)
    _, linear = jax.linearize(operator.mv, origin)

    def product(params, indexed, vector, arrays):
        del params, indexed, arrays
        return linear(vector)

    # An `lx.FunctionLinearOperator` would compare structures, places in a mesh included.
    return dataclasses.replace(operator, product=product, form=None)


lx.materialise.register(CurvatureOperator)(lambda operator: lx.materialise(operator.as_function()))
lx.diagonal.register(CurvatureOperator)(lambda operator: lx.diagonal(operator.as_function()))
lx.conj.register(CurvatureOperator)(lambda operator: operator)  # the parameters are real
register_tags(CurvatureOperator)
product_precision.register(CurvatureOperator)(lambda operator: operator.precision or 0.0)


def check_batches(batches: Any, weights: Any) -> tuple[Any, Array | None]:
    """The batches as JAX arrays, and their weights as an array."""
    batches = jtu.tree_map(jnp.asarray, batches)
    if weights is None:
        return batches, None
    weights = jnp.asarray(weights, float)
    axes = {leaf.shape[:1] for leaf in jtu.tree_leaves(batches)}
    if axes != {weights.shape}:
        raise ValueError(
            f"`weights` must be one number for each of the `batches`, got shape {weights.shape} "
            f"for {axes or 'no batches'}. Weigh the examples of a batch in the loss."
        )
    return batches, weights


# --- products -------------------------------------------------------------------------------------

# Each is called as `method(inner, outer, moving, vector)`, where `moving` are the parameters,
# `inner(moving)` the outputs, and `outer(outputs, fixed)` the scalar. `fixed` are the outputs again
# (None for a Hessian, which ignores them): products do not differentiate by them, but derivatives
# of products do.


def forward_product(inner: Callable, outer: Callable, moving: Any, vector: Any) -> Any:
    """J^T H J v."""
    out, push = jax.linearize(inner, moving)
    _, curved = jax.jvp(jax.grad(lambda x: outer(x, out)), (out,), (push(vector),))
    return jax.linear_transpose(push, moving)(curved)[0]


def forward_form(inner: Callable, outer: Callable, moving: Any, vector: Any) -> Array:
    """v^T J^T H J v, forward-over-forward."""
    out, direction = jax.jvp(inner, (moving,), (vector,))

    def slope(x):
        return jax.jvp(lambda x: outer(x, out), (x,), (direction,))[1]

    return jax.jvp(slope, (out,), (direction,))[1]


def reverse_product(inner: Callable, outer: Callable, moving: Any, vector: Any) -> Any:
    """The Hessian times v, reverse-over-reverse."""
    return jax.vjp(jax.grad(lambda x: outer(inner(x), None)), moving)[1](vector)[0]


def difference_product(inner: Callable, outer: Callable, moving: Any, vector: Any) -> Any:
    """The Hessian times v, by a central difference of two gradients.

    A step of relative size h has the error h^2 of the difference and eps / h of the rounding of the
    gradients, about equal for h = eps^(1/3). The parameter that moves most moves h times the
    root of the mean square of all (with a norm of at least 1, so that small ones move, too).
    """
    gradient = jax.grad(lambda x: outer(inner(x), None))
    gradient = closed_function(gradient, structure_of(moving))
    eps = eps_along(gradient, (moving, True))
    with jax.numpy_dtype_promotion("standard"):
        wide = [x.astype(at_least_single(x.dtype)) for x in jtu.tree_leaves(moving)]
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in wide))
        step = eps ** (1 / 3) * jnp.maximum(norm, 1) / math.sqrt(sum(x.size for x in wide))
        moves = [jnp.max(jnp.abs(v), initial=0) for v in jtu.tree_leaves(vector)]
        length = jnp.max(jnp.stack(moves))
        length = jnp.where(length > 0, length, 1)

        def gradient_at(step):
            def moved(x, v):
                return x + (step * (v / length)).astype(x.dtype)

            return gradient(jtu.tree_map(moved, moving, vector))

        def quotient(upper, lower):
            return ((upper - lower) * (length / (2 * step))).astype(upper.dtype)

        return jtu.tree_map(quotient, gradient_at(step), gradient_at(-step))


#: How second derivatives are taken. See `traceax.curvature.hessian`.
MODES = {
    "forward": forward_product,
    "reverse": reverse_product,
    "finite-difference": difference_product,
}
