r"""The operator behind `traceax.curvature`, and the checks of its arguments.

Let `inner` map parameters to outputs, with the Jacobian J, and `outer` outputs to a scalar, with
the Hessian H. A product is

    A v = J^T H J v,

forward-over-reverse. Everything that does not depend on v is computed once for all products.

A quadratic form needs no product and no reverse pass. With u = J v it is

    v^T A v = u^T H u = d^2/dt^2 outer(inner + t u) at t = 0,

forward-over-forward, in about half the time, and in the memory of v and of the activations.
"""

from collections.abc import Callable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, PyTree


@final
class CurvatureOperator(lx.AbstractLinearOperator):
    """A curvature matrix, averaged over batches. The functions of `traceax.curvature` make it."""

    product: Callable[..., Any]  # (params, (index, batch), vector) -> A vector, closure-converted
    form: Callable[..., Any] | None  # the same for the number v^T A v; None: `product` gives it
    params: PyTree[Inexact[Array, "..."]]
    batches: PyTree[Array]  # None: the data are inside `product`
    tags: frozenset[object] = eqx.field(static=True)

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
        """The mean over batches of `fn(params, (index, batch), vector)`."""
        if self.batches is None:
            return fn(self.params, (jnp.asarray(0), None), vector)
        count = jtu.tree_leaves(self.batches)[0].shape[0]

        # Reverse mode evaluates a batch again, rather than keeping the activations of all batches.
        @jax.checkpoint
        def one_batch(indexed):
            return fn(self.params, indexed, vector)

        def add(total, indexed):
            return jtu.tree_map(jnp.add, total, one_batch(indexed)), None

        indexed = (jnp.arange(count), self.batches)
        first = jtu.tree_map(lambda x: x[0], indexed)
        zero = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one_batch, first))
        total, _ = lax.scan(add, zero, indexed)
        return jtu.tree_map(lambda x: x / count, total)

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
        return jax.eval_shape(lambda: self.params)

    def out_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The structure of a product: that of the parameters."""
        return self.in_structure()


@lx.linearise.register(CurvatureOperator)
def _(operator):
    if operator.batches is not None:
        return operator  # a linearisation would hold the activations of all batches
    structure = operator.in_structure()
    origin = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), structure)
    _, linear = jax.linearize(operator.mv, origin)
    return lx.FunctionLinearOperator(linear, structure, operator.tags, closure_convert=False)


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


for _check in (
    lx.has_unit_diagonal,
    lx.is_diagonal,
    lx.is_tridiagonal,
    lx.is_lower_triangular,
    lx.is_upper_triangular,
    lx.is_negative_semidefinite,
):

    @_check.register(CurvatureOperator)
    def _(operator):
        return False


def split_params(params: Any) -> tuple[Any, Any]:
    """The parameters to differentiate, and the others: two PyTrees, each with None elsewhere."""
    params = jtu.tree_map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x, params
    )
    moving, constant = eqx.partition(params, eqx.is_inexact_array)
    leaves = jtu.tree_leaves(moving)
    if not leaves:
        raise ValueError(
            "The parameters hold no floating-point array to differentiate, got leaves of types "
            f"{sorted({type(leaf).__name__ for leaf in jtu.tree_leaves(params)})}. Pass arrays, "
            "such as `jnp.asarray(1.0)` rather than `1.0`."
        )
    if any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in leaves):
        raise ValueError(
            f"Curvature needs real parameters, got dtypes {sorted({str(x.dtype) for x in leaves})}."
            " Split complex parameters into their real and imaginary parts."
        )
    return moving, constant


def _check_batches(batches: Any) -> Any:
    """The batches as JAX arrays with the same leading axis."""
    if batches is None:
        return None
    if any(not eqx.is_array_like(leaf) for leaf in jtu.tree_leaves(batches)):
        raise TypeError(
            "`batches` must be a PyTree of arrays, got leaves of types "
            f"{sorted({type(leaf).__name__ for leaf in jtu.tree_leaves(batches)})}. Let the "
            "function close over everything else."
        )
    batches = jtu.tree_map(jnp.asarray, batches)
    shapes = [leaf.shape for leaf in jtu.tree_leaves(batches)]
    if not shapes or any(len(s) == 0 or s[0] == 0 or s[0] != shapes[0][0] for s in shapes):
        raise ValueError(
            "Every array of `batches` needs the same leading axis, one slice a batch, got shapes "
            f"{shapes}. Reshape data of shape (N, ...) to (number of batches, N / number, ...)."
        )
    return batches


def check_scalar(what: str, value: Any) -> Array:
    """Refuse a loss that does not return a floating-point scalar."""
    if not eqx.is_inexact_array(value) or value.shape != ():
        got = f"a {type(value).__name__}"
        if eqx.is_array(value):
            got = f"shape {value.shape} and dtype {value.dtype}"
        raise ValueError(
            f"{what} must return a floating-point scalar array, got {got}. Reduce it "
            "(`jnp.mean(...)`), and leave out auxiliary outputs."
        )
    return value


def check_arrays(what: str, outputs: Any) -> Any:
    """Refuse outputs that cannot be differentiated."""
    leaves = jtu.tree_leaves(outputs)
    if not leaves or not all(eqx.is_inexact_array(leaf) for leaf in leaves):
        got = [getattr(leaf, "dtype", type(leaf).__name__) for leaf in leaves]
        raise ValueError(
            f"{what} must return (a PyTree of) floating-point arrays, got leaves {got}. Convert "
            "integers with `.astype(float)`, and leave out auxiliary outputs."
        )
    return outputs


def make_curvature(
    inner: Callable[..., Any],
    outer: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    batches: Any,
    *tags: object,
) -> CurvatureOperator:
    """The operator v -> J^T H_L J v, where J is the Jacobian of `inner(index, params, *data)` with
    respect to the parameters, and H_L the Hessian of `outer(outputs, *data)` with respect to the
    outputs.
    """
    moving, constant = split_params(params)
    batches = _check_batches(batches)

    def functions(moving, indexed):
        index, batch = indexed
        data = args if batches is None else (batch, *args)

        def outputs(moving):
            return inner(index, eqx.combine(moving, constant), *data)

        return outputs, lambda out: outer(out, *data)

    def product(moving, indexed, vector):
        outputs, scalar = functions(moving, indexed)
        out, push = jax.linearize(outputs, moving)
        _, curved = jax.jvp(jax.grad(scalar), (out,), (push(vector),))
        (pulled,) = jax.linear_transpose(push, moving)(curved)
        return pulled

    def form(moving, indexed, vector):
        outputs, scalar = functions(moving, indexed)
        out, direction = jax.jvp(outputs, (moving,), (vector,))

        def slope(out):
            return jax.jvp(scalar, (out,), (direction,))[1]

        return jax.jvp(slope, (out,), (direction,))[1]

    def structure(tree):
        return jax.eval_shape(lambda: tree)

    vector = structure(moving)
    batch = structure(jtu.tree_map(lambda x: x[0], batches))
    example = (vector, (structure(jnp.asarray(0)), batch), vector)
    product = eqx.filter_closure_convert(product, *example)
    try:
        number = eqx.filter_closure_convert(form, *example)
    except (TypeError, NotImplementedError):  # a `jax.custom_vjp` has no forward mode
        number = None
    all_tags = frozenset((lx.symmetric_tag, *tags))
    return CurvatureOperator(product, number, moving, batches, all_tags)
