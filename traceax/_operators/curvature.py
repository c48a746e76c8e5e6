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
from .._core.programs import Static, closed_function
from .precision import eps_along, eps_of_product
from .unstructured import register_unstructured


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
    # Whether `args` and `batches` are a sample, in whose place another one would do.
    sampled: bool = eqx.field(default=False, static=True)

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
        first = jtu.tree_map(lambda x: x[0], indexed)
        if self.weights is None:
            shares, counted = jnp.ones(count), first
        else:
            # Divided first by the largest, because the sum may overflow.
            shares = self.weights / lax.stop_gradient(jnp.max(jnp.abs(self.weights)))
            shares = count * shares / jnp.sum(shares)
            counted = jtu.tree_map(lambda x: x[jnp.argmax(self.weights != 0)], indexed)

        wide, narrow = widened((self.params, vector, arrays))

        # Reverse mode evaluates a batch again, rather than keeping the activations of all batches.
        @jax.checkpoint
        def one_batch(indexed):
            params, vector, arrays = narrow(wide)
            return fn(params, indexed, vector, arrays)

        def add(total, each):
            indexed, share = each
            if self.weights is not None:
                # A batch of weight 0 may be padding, of which even NaN does not count. It is not
                # even evaluated, since the derivative there would be NaN times 0.
                indexed = jtu.tree_map(lambda x, y: jnp.where(share == 0, y, x), indexed, counted)

            def added(total, x):
                x = x.astype(total.dtype)
                return total + (x if self.weights is None else share.astype(x.dtype) * x)

            return jtu.tree_map(added, total, one_batch(indexed)), None

        # A sum of many terms in half precision ceases to grow.
        structure = jax.eval_shape(one_batch, first)
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
    check_choice("wrt", wrt)
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
        paths = [path for path, x in jtu.tree_leaves_with_path(params) if eqx.is_inexact_array(x)]
        if not paths:
            raise ValueError(
                "The parameters hold no floating-point array to differentiate, got leaves of types "
                f"{sorted({type(leaf).__name__ for leaf in jtu.tree_leaves(params)})}. Pass "
                "arrays, such as `jnp.asarray(1.0)` rather than `1.0`."
            )
        names = ", ".join(repr(path_name(path)) for path in paths[:4])
        raise ValueError(
            f"`wrt` chose none of the {len(paths)} floating-point arrays among the parameters, got "
            f"asked about {names}{', ...' if len(paths) > 4 else ''}. Return True for those that "
            "are to be differentiated."
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


def check_choice(name: str, chosen: Any) -> None:
    """Raise a `TypeError` if a choice among leaves is neither a function nor None."""
    if chosen is not None and not callable(chosen):
        raise TypeError(
            f"{name} must be a function of the path and the leaf, got {chosen!r}. Give, say, "
            f"`{name}=lambda path, leaf: path.startswith('params/')`."
        )


def check_batches(batches: Any, name: str = "batches") -> Any:
    """The batches, or examples, as JAX arrays with the same leading axis."""
    if batches is None:
        return None
    if any(not eqx.is_array_like(leaf) for leaf in jtu.tree_leaves(batches)):
        raise TypeError(
            f"`{name}` must be a PyTree of arrays, got leaves of types "
            f"{sorted({type(leaf).__name__ for leaf in jtu.tree_leaves(batches)})}. Let the "
            "function close over everything else."
        )
    batches = jtu.tree_map(jnp.asarray, batches)
    shapes = [leaf.shape for leaf in jtu.tree_leaves(batches)]
    if not shapes or any(len(s) == 0 or s[0] == 0 or s[0] != shapes[0][0] for s in shapes):
        raise ValueError(
            f"Every array of `{name}` needs the same leading axis, one entry for each, got shapes "
            f"{shapes}. Reshape data of shape (N, ...) to (number of batches, N / number, ...)."
        )
    return batches


def _is_list_of_batches(batches: Any) -> bool:
    """Whether this is a list of PyTrees of the same structure."""
    structures = [jtu.tree_structure(x) for x in batches] if isinstance(batches, list) else []
    return len(structures) > 0 and structures[0].num_nodes > 1 and len(set(structures)) == 1


def check_scalar(what: str, returned: Any, has_aux: bool = False) -> Array:
    """Refuse a loss that does not return a floating-point scalar, or with `has_aux` a pair of it
    and something else.
    """
    pair = isinstance(returned, tuple) and len(returned) == 2
    if has_aux and not pair:
        raise ValueError(
            "With has_aux=True the loss must return a pair (loss, aux), got a "
            f"{type(returned).__name__}. Leave has_aux out."
        )
    if pair and not has_aux:
        raise ValueError(
            f"{what} must return a floating-point scalar array, got a pair of "
            f"{' and '.join(type(x).__name__ for x in returned)}. If the second is an auxiliary "
            "output, say so: `traceax.curvature.of(loss, has_aux=True)`."
        )
    value: Any = returned[0] if has_aux else returned
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


#: How second derivatives are taken. See `traceax.curvature.hessian`.
MODES = ("forward", "reverse", "finite-difference")


def check_mode(mode: Any) -> None:
    """Raise a `ValueError` for an unknown mode."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {list(MODES)}, got {mode!r}.")


def _gradient_difference(gradient: Callable[[Any], Any], params: Any, vector: Any) -> Any:
    """The derivative of the gradient along a vector, by a central difference.

    A step of relative size h has the error h^2 of the difference and eps / h of the rounding of the
    gradients, which are about the same for h = eps^(1/3). That is how far the parameter that moves
    most does, relative to the root of the mean square of all (whose norm counts as 1 if it is
    less). Steps of one norm would move it sqrt(n) times as far along a unit vector, at an error of
    the difference that is n times as large.
    """

    def largest(tree):
        return jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in tree]))

    leaves, vectors = jtu.tree_leaves(params), jtu.tree_leaves(vector)
    gradient = closed_function(gradient, structure_of(params))
    eps = eps_along(gradient, (params, True))
    with jax.numpy_dtype_promotion("standard"):
        unit, length = (jnp.where(x > 0, x, 1) for x in (largest(leaves), largest(vectors)))
        wide = [(x / unit).astype(at_least_single(x.dtype)) for x in leaves]
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in wide)) * unit
        size = jnp.maximum(norm, 1) / math.sqrt(sum(x.size for x in leaves))
        step = eps ** (1 / 3) * size

        def moved(sign):
            return jtu.tree_map(
                lambda x, v: x + (sign * step * (v / length)).astype(x.dtype), params, vector
            )

        ahead, behind = gradient(moved(1)), gradient(moved(-1))
        return jtu.tree_map(
            lambda a, b: ((a - b) * (length / (2 * step))).astype(a.dtype), ahead, behind
        )


def _precision(product: Callable[..., Any], example: Any, mode: str) -> float:
    """The relative error of a product.

    That of a difference of gradients was 0.1 to 4 times eps^(2/3) for networks of two layers with
    18 to 2400 parameters of size 0.02 to 2, tanh, softplus and sin(3 x), and products with random
    vectors; 20 to 30 times where the last of these is steep. That of a derivative is the precision
    of what the vector passes through: many networks compute in half precision with parameters of
    single precision.
    """
    params, indexed, vector, arrays = example
    args = (params, False), (indexed, False), (vector, True), (arrays, False)
    if mode == "finite-difference":
        return 4 * eps_along(product, *args) ** (2 / 3)
    return eps_of_product(product, *args)


def _functions(
    inner: Callable[..., Any] | None,
    outer: Callable[..., Any],
    join: Any,
    mode: str,
    static: Any,
    reweighted: bool,
):
    """The product and the quadratic form, as functions of all arrays: `(params, (index, batch),
    vector, (constant, args))`.
    """

    def parts(moving, indexed, arrays):
        index, batch = indexed
        constant, args = eqx.combine(arrays, static)
        data = args if batch is None else (batch, *args)

        def outputs(moving):
            return moving if inner is None else inner(index, join(moving, constant), *data)

        def scalar_at(at):
            more = {"at": at} if reweighted else {}
            return lambda out: outer(out, constant, *data, **more)

        return outputs, scalar_at

    def product(moving, indexed, vector, arrays):
        outputs, scalar_at = parts(moving, indexed, arrays)
        if mode != "forward":
            gradient = jax.grad(lambda moving: scalar_at(None)(outputs(moving)))
            if mode == "finite-difference":
                return _gradient_difference(gradient, moving, vector)
            return jax.vjp(gradient, moving)[1](vector)[0]
        out, push = jax.linearize(outputs, moving)
        _, curved = jax.jvp(jax.grad(scalar_at(out)), (out,), (push(vector),))
        (pulled,) = jax.linear_transpose(push, moving)(curved)
        return pulled

    def form(moving, indexed, vector, arrays):
        outputs, scalar_at = parts(moving, indexed, arrays)
        out, direction = jax.jvp(outputs, (moving,), (vector,))
        scalar = scalar_at(out)

        def slope(out):
            return jax.jvp(scalar, (out,), (direction,))[1]

        return jax.jvp(slope, (out,), (direction,))[1]

    return product, form


def make_curvature(
    inner: Callable[..., Any] | None,
    outer: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    batches: Any,
    *tags: object,
    weights: Any = None,
    wrt: Callable[[str, Any], bool] | None = None,
    mode: str = "forward",
    join: Callable[[Any, Any], Any] = eqx.combine,
    programs: dict[Any, Any] | None = None,
    sampled: bool = False,
    reweighted: bool = False,
) -> CurvatureOperator:
    """The operator v -> J^T H_L J v, where J is the Jacobian of `inner(index, params, *data)` with
    respect to the parameters, and H_L the Hessian of `outer(outputs, constant, *data)` with respect
    to the outputs. `constant` are the parameters that do not move.

    **Arguments:**

    - `inner`, `outer`: the functions. Without `inner` the outputs are the parameters that move.
    - `params`, `args`: the parameters and the other arguments. If `params` is a pair of PyTrees
        from `split_params`, the first of them moves.
    - `batches`: batches along a leading axis, or None.
    - `tags`: further tags of the operator.
    - `weights`: a weight for each batch, or None.
    - `wrt`: see `split_params`; None if they are split.
    - `mode`: see `traceax.curvature.hessian`.
    - `join`: makes parameters of those that move and the others.
    - `sampled`: whether `args` and `batches` are a sample, in whose place another one would do.
    - `reweighted`: whether `outer` gets the outputs a second time, as `at`. Products do not
        differentiate it by them, but derivatives of products do.
    - `programs`: traced programs of the same functions, by the structure of all arguments. Without
        them the functions are traced.

    **Returns:**

    A `CurvatureOperator`.
    """
    moving, constant = params if isinstance(params, Split) else split_params(params, wrt)
    batches = check_batches(batches)
    weights = _check_weights(weights, batches)
    arrays, static = eqx.partition((constant, args), eqx.is_array)

    vector = structure_of(moving)
    batch = structure_of(batches, axes=1)
    index = structure_of(jnp.asarray(0))
    example = (vector, (index, batch), vector, structure_of(arrays))
    leaves, treedef = jtu.tree_flatten((example, static))
    identity = (Static(treedef), *(Static(leaf) for leaf in leaves))
    found = None if programs is None else programs.get(identity)
    if found is None:
        functions = _functions(inner, outer, join, mode, static, reweighted)
        try:
            product, number = closed_function(functions[0], *example), None
        except Exception as error:  # the user's function got something else than it expects
            if _is_list_of_batches(batches):
                error.add_note(
                    "`batches` is one PyTree, whose arrays have an axis of batches in front. Stack "
                    "a list of batches: `jax.tree.map(lambda *x: jnp.stack(x), *batches)`."
                )
            raise
        if mode == "forward":
            try:
                number = closed_function(functions[1], *example)
            except (TypeError, NotImplementedError):  # a `jax.custom_vjp` has no forward mode
                number = None
        found = product, number, _precision(product, example, mode)
        traced = any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(found))
        if programs is not None and not traced:
            programs[identity] = found
    product, number, precision = found
    return CurvatureOperator(
        product,
        number,
        moving,
        arrays[0],
        arrays[1],
        batches,
        frozenset((lx.symmetric_tag, *tags)),
        weights,
        precision,
        mode == "finite-difference",
        sampled,
    )


def _check_weights(weights: Any, batches: Any) -> Array | None:
    """The weights as an array, one for each batch."""
    if weights is None:
        return None
    count = None if batches is None else jtu.tree_leaves(batches)[0].shape[0]
    weights = jnp.asarray(weights)
    if count is None or weights.shape != (count,):
        raise ValueError(
            f"`weights` must be one number for each of the {count or 'missing'} `batches`, got "
            f"shape {weights.shape}. Weigh the examples of a batch in the loss."
        )
    inexact = jnp.issubdtype(weights.dtype, jnp.inexact)
    return weights if inexact else weights.astype(jax.dtypes.canonicalize_dtype(float))


class Groups(NamedTuple):
    """Parameters in groups: of each name the leaves, or the entries along the leading axis of a
    leaf. The grouped parameters are a dictionary with one array of shape `(size,)` for each name.
    """

    members: dict[str, list[tuple[int, int | None]]]  # of each name the leaves, or their entries
    structure: Any

    @classmethod
    def of(cls, moving: Any, groups: Callable[[str, Any], Any]) -> "Groups":
        """The groups of these parameters.

        **Arguments:**

        - `moving`: the parameters that are differentiated.
        - `groups`: called as `groups(path, leaf)` for each; returns a name, or a list of names, one
            for each entry along the leading axis of the leaf.
        """
        members: dict[str, list[tuple[int, int | None]]] = {}
        for i, (path, leaf) in enumerate(jtu.tree_leaves_with_path(moving)):
            names = groups(path_name(path), leaf)
            several = isinstance(names, tuple | list)
            axis = leaf.shape[:1] if several else (1,)
            each = list(names) if several else [names]
            if axis != (len(each),) or not all(isinstance(name, str) for name in each):
                raise ValueError(
                    "groups must return a name (a str), or a list of names, one for each entry "
                    f"along the leading axis, got {names!r} for {path_name(path)!r} of shape "
                    f"{leaf.shape}. Return the path for a group of its own."
                )
            for j, name in enumerate(each):
                members.setdefault(name, []).append((i, j if several else None))
        leaves = jtu.tree_leaves(moving)
        for name, parts in members.items():
            dtypes = sorted({str(leaves[i].dtype) for i, _ in parts})
            if len(dtypes) > 1:
                raise ValueError(
                    f"The parameters of a group need one dtype, got {dtypes} in {name!r}. Make a "
                    "group of each dtype."
                )
        return cls(members, structure_of(moving))

    def pack(self, moving: Any) -> dict[str, Array]:
        """The grouped parameters."""
        leaves = jtu.tree_leaves(moving)

        def flat(i, j):
            return (leaves[i] if j is None else leaves[i][j]).reshape(-1)

        return {
            name: jnp.concatenate([flat(i, j) for i, j in parts])
            for name, parts in self.members.items()
        }

    def unpack(self, grouped: dict[str, Array]) -> Any:
        """The parameters (or another vector of their structure) from grouped ones."""
        structs, treedef = jtu.tree_flatten(self.structure)
        pieces: list[dict[int | None, Array]] = [{} for _ in structs]
        for name, parts in self.members.items():
            start = 0
            for i, j in parts:
                shape = structs[i].shape if j is None else structs[i].shape[1:]
                size = math.prod(shape)
                pieces[i][j] = grouped[name][start : start + size].reshape(shape)
                start += size
        leaves = [
            piece[None] if None in piece else jnp.stack([piece[j] for j in range(len(piece))])
            for piece in pieces
        ]
        return jtu.tree_unflatten(treedef, leaves)
