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
from contextlib import suppress
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, PyTree

from .._core.precision import at_least_single, widened
from .._core.programs import closed_function
from .precision import eps_along, eps_of_product
from .tags import register_unstructured


def structure_of(tree: Any, axes: int = 0) -> Any:
    """The shapes and dtypes of arrays, without so many leading axes. (`jax.eval_shape` would trace
    a function for them.)
    """
    return jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape[axes:], x.dtype), tree)


@final
class CurvatureOperator(lx.AbstractLinearOperator):
    """A curvature matrix, averaged over batches. The functions of `traceax.curvature` make it."""

    # (params, (index, batch), vector, (constant, args)) -> A vector, closure-converted
    product: Callable[..., Any]
    form: Callable[..., Any] | None  # the same for the number v^T A v; None: `product` gives it
    params: PyTree[Inexact[Array, "..."]]
    constant: PyTree[Array]  # the arrays among the parameters that do not move
    args: PyTree[Array]
    batches: PyTree[Array]  # None: the data are in `args`, or inside `product`
    tags: frozenset[object] = eqx.field(static=True)
    weights: Array | None = None  # of the batches; None: all the same
    # The relative precision of a product, where the dtypes of the parameters do not show it.
    precision: float | None = eqx.field(default=None, static=True)
    differences: bool = eqx.field(default=False, static=True)  # of gradients: see `hessian`

    def mv(self, vector: PyTree[Inexact[Array, "..."]]) -> PyTree[Inexact[Array, "..."]]:
        """The product with a vector.

        **Arguments:**

        - `vector`: a PyTree like the parameters, of their shapes and dtypes.

        **Returns:**

        The product, a PyTree of the same structure.
        """
        return self._mean(self.product, vector)

    def quadratic_form(self, vector: PyTree[Inexact[Array, "..."]]) -> Inexact[Array, ""]:
        """The number `v^T A v`, in about half the time of a product.

        **Arguments:**

        - `vector`: a PyTree like the parameters, of their shapes and dtypes.

        **Returns:**

        A scalar array.
        """
        if self.form is not None:
            return self._mean(self.form, vector)
        with jax.numpy_dtype_promotion("standard"):
            dots = jtu.tree_map(lambda a, b: jnp.sum(a * b), vector, self.mv(vector))
            return jnp.asarray(sum(jtu.tree_leaves(dots)))

    def _mean(self, fn: Callable[..., Any], vector: Any) -> Any:
        """The mean over batches of `fn(params, (index, batch), vector, (constant, args))`."""
        arrays = (self.constant, self.args)
        if self.batches is None:
            return fn(self.params, (jnp.asarray(0), None), vector, arrays)
        count = jtu.tree_leaves(self.batches)[0].shape[0]
        indexed = (jnp.arange(count), self.batches)
        weights = jnp.ones(count) if self.weights is None else self.weights
        # Divided first by the largest, because the sum may overflow.
        shares = weights / lax.stop_gradient(jnp.max(jnp.abs(weights)))
        shares = count * shares / jnp.sum(shares)
        counted = jtu.tree_map(lambda x: x[jnp.argmax(weights != 0)], indexed)
        wide, narrow = widened((self.params, vector, arrays))

        # Reverse mode evaluates a batch again, rather than keeping the activations of all batches.
        @jax.checkpoint
        def one_batch(indexed):
            params, vector, arrays = narrow(wide)
            return fn(params, indexed, vector, arrays)

        def add(total, each):
            indexed, share = each
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

    def _function(self) -> lx.FunctionLinearOperator:
        return lx.FunctionLinearOperator(self.mv, self.in_structure(), self.tags)

    def as_matrix(self) -> Inexact[Array, "n n"]:
        """The dense matrix, by `n` products."""
        return self._function().as_matrix()

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
    structure = operator.in_structure()
    origin = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), structure)
    _, linear = jax.linearize(operator.mv, origin)

    def product(params, indexed, vector, arrays):
        del params, indexed, arrays
        return linear(vector)

    # An `lx.FunctionLinearOperator` would compare structures, places in a mesh included.
    return dataclasses.replace(operator, product=product, form=None)


@lx.materialise.register(CurvatureOperator)
def _(operator):
    return lx.materialise(operator._function())


@lx.diagonal.register(CurvatureOperator)
def _(operator):
    return lx.diagonal(operator._function())


@lx.conj.register(CurvatureOperator)
def _(operator):
    return operator  # the parameters are real


@lx.is_symmetric.register(CurvatureOperator)
def _(operator):
    return True


@lx.is_positive_semidefinite.register(CurvatureOperator)
def _(operator):
    return lx.positive_semidefinite_tag in operator.tags


register_unstructured(CurvatureOperator)


class Split(NamedTuple):
    """The parameters to differentiate, and the others: two PyTrees, each with None elsewhere."""

    moving: Any
    constant: Any


def split_params(params: Any, wrt: Callable[[str, Any], bool] | None = None) -> Split:
    """The parameters to differentiate, and the others.

    **Arguments:**

    - `params`: the parameters.
    - `wrt`: called as `wrt(path, leaf)` for each floating-point array: whether to differentiate it.
    """
    params = jtu.tree_map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x, params
    )
    chosen = jtu.tree_map_with_path(
        lambda path, x: bool(eqx.is_inexact_array(x) and (wrt is None or wrt(path_name(path), x))),
        params,
    )
    moving, constant = eqx.partition(params, chosen)
    leaves = jtu.tree_leaves(moving)
    if not leaves:
        names = [path_name(path) for path, _ in jtu.tree_leaves_with_path(params)]
        raise ValueError(
            "`wrt` chose none of the floating-point arrays among the parameters, got leaves "
            f"{names[:4]} of types {sorted({type(x).__name__ for x in jtu.tree_leaves(params)})}. "
            "Return True for those to differentiate, and pass arrays (`jnp.asarray(1.0)`)."
        )
    if any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in leaves):
        raise ValueError(
            f"Curvature needs real parameters, got dtypes {sorted({str(x.dtype) for x in leaves})}."
            " Split complex parameters into their real and imaginary parts."
        )
    return Split(moving, constant)


def path_name(path: tuple[Any, ...]) -> str:
    """The path of a leaf as `"layers/0/weight"`."""
    return jtu.keystr(path, simple=True, separator="/")


def _check_batches(batches: Any) -> Any:
    """The batches as JAX arrays with the same leading axis."""
    batches = jtu.tree_map(jnp.asarray, batches)
    shapes = [leaf.shape for leaf in jtu.tree_leaves(batches)]
    axes = {shape[:1] for shape in shapes}
    if len(axes) != 1 or axes & {(), (0,)}:
        raise ValueError(
            "Every array of `batches` needs the same leading axis, one entry for each, got shapes "
            f"{shapes}. Reshape data of shape (N, ...) to (number of batches, N / number, ...)."
        )
    return batches


def _check_weights(weights: Any, batches: Any) -> Array:
    """The weights as an array, one for each batch."""
    weights = jnp.asarray(weights, float)
    shapes = {leaf.shape[:1] for leaf in jtu.tree_leaves(batches)}
    if shapes != {weights.shape}:
        raise ValueError(
            f"`weights` must be one number for each of the `batches`, got shape {weights.shape} "
            f"for {shapes or 'no batches'}. Weigh the examples of a batch in the loss."
        )
    return weights


def _gradient_difference(gradient: Callable[[Any], Any], params: Any, vector: Any) -> Any:
    """The derivative of the gradient along a vector, by a central difference.

    A step of relative size h has the error h^2 of the difference and eps / h of the rounding of the
    gradients, which are about the same for h = eps^(1/3). That is how far the parameter that moves
    most does, relative to the root of the mean square of all (whose norm counts as 1 if it is
    less). Steps of one norm would move it sqrt(n) times as far along a unit vector, at an error of
    the difference that is n times as large.
    """
    gradient = closed_function(gradient, structure_of(params))
    eps = eps_along(gradient, (params, True))

    def gradient_at(step):
        def moved(x, v):
            return x + (step * (v / length)).astype(x.dtype)

        return gradient(jtu.tree_map(moved, params, vector))

    with jax.numpy_dtype_promotion("standard"):
        wide = [x.astype(at_least_single(x.dtype)) for x in jtu.tree_leaves(params)]
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in wide))
        step = eps ** (1 / 3) * jnp.maximum(norm, 1) / math.sqrt(sum(x.size for x in wide))
        moves = [jnp.max(jnp.abs(v), initial=0) for v in jtu.tree_leaves(vector)]
        length = jnp.max(jnp.stack(moves))
        length = jnp.where(length > 0, length, 1)
        return jtu.tree_map(
            lambda ahead, behind: ((ahead - behind) * (length / (2 * step))).astype(ahead.dtype),
            gradient_at(step),
            gradient_at(-step),
        )


class Composition(NamedTuple):
    """The function of the parameters that is differentiated, in two parts."""

    # (index of the batch, params, *data) -> outputs; None: the outputs are the parameters
    inner: Callable[..., Any] | None
    # (outputs, at, *data) -> a scalar. `at` are the outputs again: products do not differentiate by
    # them, but derivatives of products do.
    outer: Callable[..., Any]
    join: Callable[[Any, Any], Any] = eqx.combine  # of the moving and the constant parameters

    def parts(self, indexed: Any, arrays: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`inner`, as a function of the moving parameters, and `outer`, of outputs and `at`."""
        index, batch = indexed
        constant, args = arrays
        data = args if batch is None else (batch, *args)

        def outputs(moving):
            inner = self.inner
            return moving if inner is None else inner(index, self.join(moving, constant), *data)

        def scalar(out, at):
            return self.outer(self.join(out, constant) if self.inner is None else out, at, *data)

        return outputs, scalar

    def product(self, moving: Any, indexed: Any, vector: Any, arrays: Any) -> Any:
        """J^T H J v."""
        outputs, scalar = self.parts(indexed, arrays)
        out, push = jax.linearize(outputs, moving)
        _, curved = jax.jvp(jax.grad(lambda x: scalar(x, out)), (out,), (push(vector),))
        (pulled,) = jax.linear_transpose(push, moving)(curved)
        return pulled

    def form(self, moving: Any, indexed: Any, vector: Any, arrays: Any) -> Array:
        """v^T J^T H J v, forward-over-forward."""
        outputs, scalar = self.parts(indexed, arrays)
        out, direction = jax.jvp(outputs, (moving,), (vector,))

        def slope(x):
            return jax.jvp(lambda x: scalar(x, out), (x,), (direction,))[1]

        return jax.jvp(slope, (out,), (direction,))[1]

    def gradient(self, indexed: Any, arrays: Any) -> Callable[[Any], Any]:
        """The gradient of the whole function."""
        outputs, scalar = self.parts(indexed, arrays)
        return jax.grad(lambda moving: scalar(outputs(moving), None))

    def reverse(self, moving: Any, indexed: Any, vector: Any, arrays: Any) -> Any:
        """The Hessian times v, reverse-over-reverse."""
        return jax.vjp(self.gradient(indexed, arrays), moving)[1](vector)[0]

    def difference(self, moving: Any, indexed: Any, vector: Any, arrays: Any) -> Any:
        """The Hessian times v, by a difference of two gradients."""
        return _gradient_difference(self.gradient(indexed, arrays), moving, vector)


#: How second derivatives are taken. See `traceax.curvature.hessian`.
MODES = {
    "forward": Composition.product,
    "reverse": Composition.reverse,
    "finite-difference": Composition.difference,
}


def check_mode(mode: Any) -> None:
    """Raise a `ValueError` for an unknown mode."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {list(MODES)}, got {mode!r}.")


def _programs(composition: Composition, mode: str, example: Any, static: Any) -> Any:
    """The product, the quadratic form and the precision of products, for all arrays like these."""

    def close(method):
        def of_arrays(moving, indexed, vector, arrays):
            return method(composition, moving, indexed, vector, eqx.combine(arrays, static))

        return closed_function(of_arrays, *example)

    product = close(MODES[mode])
    moving, indexed, vector, arrays = example
    followed = (moving, False), (indexed, False), (vector, True), (arrays, False)
    if mode == "finite-difference":
        # At most this where the loss is smooth.
        return product, None, 4 * eps_along(product, *followed) ** (2 / 3)
    form = None
    if mode == "forward":
        with suppress(TypeError, NotImplementedError):  # a `jax.custom_vjp` has no forward mode
            form = close(Composition.form)
    # Many networks compute in half precision with parameters of single precision.
    return product, form, eps_of_product(product, *followed)


def make_curvature(
    composition: Composition,
    split: Split,
    args: tuple[Any, ...],
    batches: Any = None,
    weights: Any = None,
    tags: tuple[object, ...] = (),
    mode: str = "forward",
    traced: dict[Any, Any] | None = None,
) -> CurvatureOperator:
    """The operator v -> J^T H_L J v, where J is the Jacobian of the inner function with respect to
    the parameters that move, and H_L the Hessian of the outer one with respect to the outputs.

    **Arguments:**

    - `composition`: the functions.
    - `split`: the parameters.
    - `args`: the other arguments.
    - `batches`, `weights`: batches along a leading axis, and a weight for each, or None.
    - `tags`: further tags of the operator.
    - `mode`: see `traceax.curvature.hessian`.
    - `traced`: programs of the same functions, by the structure of all arguments.

    **Returns:**

    A `CurvatureOperator`.
    """
    args = jtu.tree_map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, args)
    batches = None if batches is None else _check_batches(batches)
    weights = None if weights is None else _check_weights(weights, batches)
    arrays, static = eqx.partition((split.constant, args), eqx.is_array)
    vector = structure_of(split.moving)
    indexed = (structure_of(jnp.asarray(0)), structure_of(batches, axes=1))
    example = (vector, indexed, vector, structure_of(arrays))

    leaves, treedef = jtu.tree_flatten((example, static))
    place = (treedef, *((type(x), x) for x in leaves))  # 2 is not 2.0
    try:
        programs = None if traced is None else traced.get(place)
    except TypeError:  # an argument that has no hash
        programs = traced = None
    if programs is None:
        programs = _programs(composition, mode, example, static)
        # Functions that hold traced arrays differ from call to call.
        holds_tracers = any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(programs))
        if traced is not None and not holds_tracers:
            traced[place] = programs
    product, form, precision = programs
    return CurvatureOperator(
        product=product,
        form=form,
        params=split.moving,
        constant=arrays[0],
        args=arrays[1],
        batches=batches,
        tags=frozenset((lx.symmetric_tag, *tags)),
        weights=weights,
        precision=precision,
        differences=mode == "finite-difference",
    )
