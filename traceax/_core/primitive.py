"""The JAX primitives behind every estimate, such as `trace_p`, and `compiled_once` for other
functions.

No other file touches `jax.extend` or `jax.interpreters`. (No file touches `equinox.internal` or
`jax._src`.) `programs` says what may be static in a program.

The operands of a primitive are the key and the arrays in the operator and the estimator; everything
else is static and hashable. The implementation and the derivative are plain functions of those
arrays, `_run` and `_tangent`. The rules of the primitive only call these two:

- abstract evaluation is `jax.eval_shape` of `_run`;
- batching adds a *vmap* (the batched axes of the operands) to the static parameters and binds the
  primitive again, so that a vmapped estimate is still this primitive and keeps its JVP rule;
  `_run` and `_tangent` are vmapped over these vmaps, innermost first;
- the JVP asks for the weights (U, V) beside the value, and contracts them with the tangent of the
  operator. The weights have a tangent only where E[G] depends on A: see `weights_at` of
  `AbstractEstimator`.

Both are jitted with static parameters: an identical call, eager or traced, is not traced again.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import get_abstract_mesh, use_abstract_mesh
from jaxtyping import Array

from .devices import with_auto_axes
from .estimate import Estimate
from .precision import any_promotion
from .programs import Static, closed_functions, is_plain
from .verdict import verdict


class _Vmap(NamedTuple):
    """One `vmap`: the batched axis of each operand (None: not batched)."""

    axes: tuple[int | None, ...]
    size: int
    name: Any
    spmd_name: Any


class _Params(NamedTuple):
    """Everything that is static in a call."""

    treedef: Static  # of (key, operator, estimator)
    static: tuple[Static | None, ...]  # None where the leaf is an operand
    k: int
    weights: bool
    vmaps: tuple[_Vmap, ...]
    plain: bool  # whether nothing static holds an array, see `is_plain`


def _rebuild(params: _Params, operands: Sequence[Array]):
    remaining = iter(operands)
    leaves = [next(remaining) if s is None else s.value for s in params.static]
    return jtu.tree_unflatten(params.treedef.value, leaves)


def _vmapped(fn, vmaps: tuple[_Vmap, ...], in_axes):
    """`fn` vmapped over all of them, innermost first; `in_axes(vmap)` gives the axes of its
    arguments.
    """
    for vmap in vmaps:
        options = {"axis_size": vmap.size, "spmd_axis_name": vmap.spmd_name}
        fn = jax.vmap(fn, in_axes(vmap), 0, axis_name=vmap.name, **options)
    return fn


def _compiled(fn: Callable[..., Any], static: tuple[Any, ...], *operands: Any) -> Any:
    """`fn(*static, *operands)`, jitted; the parameters come first in `static`.

    JAX never frees a compiled program and its static arguments, which may hold arrays. So only a
    few programs with such arguments are kept, and none that is a part of another one, whose tracers
    the arrays may be.
    """
    if static[0].plain:
        return _forever[fn](*static, *operands)
    traced = any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(operands))
    once = _for_a_while.__wrapped__
    return (once if traced else _for_a_while)(fn, *static)(*operands)


def _run(params: _Params, operands: tuple[Array, ...]):
    """The implementation, compiled: (Estimate, weights or None)."""
    return _compiled(_implementation, (params,), operands)


def _implementation(params: _Params, operands: tuple[Array, ...]):
    """The implementation: (Estimate, weights or None)."""

    def one_call(operands):
        key, operator, estimator = _rebuild(params, operands)
        if params.k >= estimator.size(operator):
            estimate, weights = estimator.exact(operator)
        else:
            estimate, weights = estimator.compute(key, operator, params.k, params.weights)
        estimate = verdict(estimator.judged(estimate), estimator.is_hermitian(operator))
        # Whole or not, degrees of freedom are of one dtype: `lax.cond` between two estimators.
        dof = estimate.dof.astype(jtu.tree_leaves(estimate.std_err)[0].dtype)
        estimate = dataclasses.replace(estimate, dof=dof)
        return estimate, weights if params.weights else None

    # The algebra mixes real and complex numbers, whatever promotion the user allows.
    with any_promotion():
        return _vmapped(one_call, params.vmaps, lambda vmap: (vmap.axes,))(operands)


def _tangent(
    params: _Params, moving: tuple[int, ...], of_weights: bool, operands, tangents, weights
):
    """The tangent of the value, sum_j v_j^H dA u_j by `contract`, or with `of_weights` that of the
    weights by `weights_at`. The operands numbered `moving` have `tangents`, the others none.
    """

    def push(operands, tangents, weights):
        def of_moving(moved):
            complete = list(operands)
            for i, operand in zip(moving, moved, strict=True):
                complete[i] = operand
            _, operator, estimator = _rebuild(params, complete)
            rule = estimator.weights_at if of_weights else estimator.contract
            return rule(weights, operator)

        primals = tuple(operands[i] for i in moving)
        return jax.jvp(of_moving, (primals,), (tangents,))[1]

    def in_axes(vmap):
        return vmap.axes, tuple(vmap.axes[i] for i in moving), 0

    with any_promotion():
        return _vmapped(push, params.vmaps, in_axes)(operands, tangents, weights)


def _call(params: _Params, operands: tuple[Array, ...]):
    """The result of a function, which comes before its arguments among what is rebuilt."""
    fn, *args = _rebuild(params, operands)
    with any_promotion():
        return fn(*args)


_forever = {
    _implementation: jax.jit(_implementation, static_argnums=0),
    _call: jax.jit(_call, static_argnums=0),
    _tangent: jax.jit(_tangent, static_argnums=(0, 1, 2)),
}


@lru_cache(maxsize=4)
def _for_a_while(fn: Callable[..., Any], *static: Any) -> Callable[..., Any]:
    return jax.jit(partial(fn, *static))


def _flat_run(*operands, params):
    # Lowering sets the mesh explicitly. With the mesh set here and in `_outputs` too, all three
    # share one trace.
    with use_abstract_mesh(get_abstract_mesh()):
        return jtu.tree_leaves(_run(params, operands))


def _outputs(params, avals):
    """The shapes of the results of `_run`, called with shapes, not `avals`: calls share a trace."""
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals)
    with use_abstract_mesh(get_abstract_mesh()):
        return jax.eval_shape(partial(_run, params), structs)


def _unflatten(params, operands, outputs):
    """The flat outputs of the primitive, in the structure of what `_run` returns."""
    structure = jtu.tree_structure(_outputs(params, [jax.typeof(x) for x in operands]))
    return jtu.tree_unflatten(structure, outputs)


def _abstract_eval(*avals, params):
    outputs = jtu.tree_leaves(_outputs(params, avals))
    return [jax.core.ShapedArray(out.shape, out.dtype) for out in outputs]


def _batch(primitive, vmapped, operands, axes, *, params):
    # Without a batched operand there is nothing to vmap over, unless the axis has a name: the
    # operator may use it.
    if all(axis is None for axis in axes) and not isinstance(vmapped.name, str):
        outputs = primitive.bind(*operands, params=params)
        return outputs, [None] * len(outputs)
    vmap = _Vmap(tuple(axes), vmapped.size, vmapped.name, vmapped.spmd_name)
    outputs = primitive.bind(*operands, params=params._replace(vmaps=(*params.vmaps, vmap)))
    return outputs, [0] * len(outputs)


@jax.jit
def _tangent_of(x: Array, t: Array) -> Array:
    """The tangent t of an output x. Where x is NaN, the tangent is (by a product, whose transpose
    is NaN as well), whatever the weights of a failed estimate are.
    """
    return (jnp.real(t) if jnp.isrealobj(x) else t) * jnp.where(jnp.isnan(x), x, 1)


def _jvp(primitive, primals, tangents, *, params):
    with_weights = params._replace(weights=True)
    # Python numbers among the tangents of `jax.jvp` arrive here unconverted.
    tangents = [jnp.asarray(x) if isinstance(x, float | complex) else x for x in tangents]
    outputs = primitive.bind(*primals, params=with_weights)

    def moves(tangent):
        return type(tangent) is not ad.Zero and tangent.dtype != jax.dtypes.float0

    moving = tuple(i for i, tangent in enumerate(tangents) if moves(tangent))
    estimate, weights = _unflatten(with_weights, primals, outputs)
    outputs_t: list[Any] = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outputs]
    count = len(jtu.tree_leaves(estimate))
    if moving:
        operands = (tuple(primals), tuple(tangents[i] for i in moving), weights)
        values_t = jtu.tree_leaves(_compiled(_tangent, (with_weights, moving, False), *operands))
        # The value comes first among the outputs.
        for i, (x, t) in enumerate(zip(outputs, values_t, strict=False)):
            outputs_t[i] = _tangent_of(x, t)
        # If this call returns weights, it belongs to a derivative, which is differentiated again.
        if params.weights and _rebuild(params, primals)[2].weights_depend_on_operator:
            weights_t = _compiled(_tangent, (with_weights, moving, True), *operands)
            outputs_t[count:] = jtu.tree_leaves(weights_t)
    if not params.weights:
        return outputs[:count], outputs_t[:count]
    return outputs, outputs_t


def _define(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(_flat_run)
    primitive.def_abstract_eval(_abstract_eval)
    batching.fancy_primitive_batchers[primitive] = partial(_batch, primitive)
    ad.primitive_jvps[primitive] = partial(_jvp, primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(_flat_run, multiple_results=True))
    return primitive


# One primitive for each quantity that is estimated: they differ only in their names in a jaxpr.
#: The primitive of [`traceax.trace`][]: an estimate is one equation of a jaxpr with it.
trace_p = _define("trace")
#: The primitive of [`traceax.diagonal`][]: an estimate is one equation of a jaxpr with it.
diagonal_p = _define("diagonal")
spectral_sum_p = _define("spectral_sum")
spectral_diagonal_p = _define("spectral_diagonal")
spectral_density_p = _define("spectral_density")
eigenpairs_p = _define("eigenpairs")
logdet_p = _define("logdet")
inverse_trace_p = _define("inverse_trace")
inverse_diagonal_p = _define("inverse_diagonal")
gaussian_log_density_p = _define("gaussian_log_density")


def _split(tree: Any, k: int = 0) -> tuple[_Params, list[Array]]:
    """What is static in a PyTree, and its arrays: see `_rebuild`."""
    leaves, treedef = jtu.tree_flatten(closed_functions(tree))
    leaves = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in leaves]
    static = tuple(None if isinstance(leaf, jax.Array) else Static(leaf) for leaf in leaves)
    plain = all(map(is_plain, [treedef, *(x for x in static if x is not None)]))
    params = _Params(Static(treedef), static, k, False, (), plain)
    return params, [leaf for leaf in leaves if isinstance(leaf, jax.Array)]


def bind(
    primitive: Primitive, key: Array, operator: lx.AbstractLinearOperator, k: int, estimator: Any
) -> Estimate:
    """Estimate through a primitive, such as `trace_p`, with a raw or typed scalar `key`.

    The operator is checked, with all arrays as leaves; `k` is within bounds. `compute` of the
    estimator does the work, or `exact` for `k >= n`.
    """
    params, operands = _split((key, operator, estimator), k)

    def estimate(*operands):
        return _unflatten(params, operands, primitive.bind(*operands, params=params))[0]

    return with_auto_axes(estimate, operands)


def compiled_once(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, compiled once for all arguments that differ in their arrays only. `fn` is a
    global function; all arrays of an operator among the arguments are leaves.
    """
    params, operands = _split((fn, *args))
    return with_auto_axes(lambda *given: _compiled(_call, (params,), given), operands)
