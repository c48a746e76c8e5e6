"""The JAX primitives under every estimate, such as `trace_p`; and what makes a primitive of a
function that runs on several devices.

This is the only file that touches `jax.extend` or `jax.interpreters`. (None touches
`equinox.internal` or `jax._src`.) What may be static in a program is in `programs`.

Operands are the arrays inside (raw key, operator); everything else is static and hashable. The
implementation and the derivative are plain functions of those arrays, `_run` and `_push_forward`;
the rules below only arrange them:

- abstract evaluation is `jax.eval_shape` of `_run`;
- batching adds a *level* (the axes of the operands) to the static parameters and binds again, so
  that a vmapped estimate still is this primitive and keeps its JVP rule; `_run` and
  `_push_forward` are vmapped over the levels, innermost first;
- the JVP asks for the weights (U, V) beside the value and contracts them with the tangent of the
  operator. Weights have no tangent themselves, but where E[G] depends on A: see `weights_at` of
  `AbstractEstimator`.

`_run` and `_push_forward` are jitted with the parameters static, so that an identical call,
eager or traced, is not traced again.
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
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, get_abstract_mesh, use_abstract_mesh
from jaxtyping import Array

from .devices import needs_devices, with_auto_axes
from .estimate import NONFINITE, Estimate, weights_wanted
from .precision import any_promotion
from .programs import NOTHING, TRACERS, Static, closed_functions, holds


class _Level(NamedTuple):
    """One `vmap`: the batched axis of each operand (None: not batched)."""

    axes: tuple[int | None, ...]
    size: int
    name: Any
    spmd_name: Any


class _Params(NamedTuple):
    """Everything static about a call."""

    treedef: Static  # of (raw key, operator, estimator)
    static: tuple[Static | None, ...]  # None where the leaf is an operand
    key_impl: Any
    k: int
    weights: bool
    levels: tuple[_Level, ...]
    held: int  # what the functions among them hold where it is no operand: see `holds`
    inside: ClosedJaxpr  # see `needs_devices`


def _rebuild(params: _Params, operands: Sequence[Array]):
    remaining = iter(operands)
    leaves = [next(remaining) if s is None else s.value for s in params.static]
    return jtu.tree_unflatten(params.treedef.value, leaves)


def _vmapped(fn, levels: tuple[_Level, ...], in_axes):
    """`fn` vmapped over all levels; `in_axes(level)` gives the axes of its arguments."""
    for level in levels:
        options = {"axis_size": level.size, "spmd_axis_name": level.spmd_name}
        fn = jax.vmap(fn, in_axes(level), 0, axis_name=level.name, **options)
    return fn


def _compiled(fn: Callable[..., Any], params: _Params, *static: Any) -> Callable[..., Any]:
    """`fn` with its static arguments, the first of which are the parameters.

    JAX keeps compiled programs with their static arguments for good: of those whose functions hold
    arrays (which are no operands), no more than a few are kept, and none whose arrays are traced.
    """
    if params.held == NOTHING:
        return partial(_forever[fn], params, *static)
    once = _for_a_while.__wrapped__
    return (once if params.held == TRACERS else _for_a_while)(fn, params, *static)


def _run(params: _Params, operands: tuple[Array, ...]):
    """The implementation, compiled: (Estimate, weights or None)."""
    return _compiled(_implementation, params)(operands)


def _implementation(params: _Params, operands: tuple[Array, ...]):
    """The implementation: (Estimate, weights or None)."""

    def run(operands):
        key, operator, estimator = _rebuild(params, operands)
        operator = estimator.batched(operator)
        if params.key_impl is not None:
            key = jax.random.wrap_key_data(key, impl=params.key_impl)
        with weights_wanted(params.weights):
            if params.k >= operator.in_size():
                estimate, weights = estimator.exact(operator)
            else:
                estimate, weights = estimator.compute(key, operator, params.k)
        # A number computed from NaN or inf is not an estimate, plausible as it may look.
        failed = estimate.status == NONFINITE

        def masked(x):
            return jnp.where(failed, jnp.full((), jnp.nan, x.dtype), x)

        value, std_err = jtu.tree_map(masked, (estimate.value, estimate.std_err))
        estimate = dataclasses.replace(estimate, value=value, std_err=std_err)
        return estimate, weights if params.weights else None

    # The algebra mixes real and complex: it must not depend on the user's promotion setting.
    with any_promotion():
        return _vmapped(run, params.levels, lambda level: (level.axes,))(operands)


def _push_forward(
    params: _Params, moving: tuple[int, ...], of_weights: bool, operands, tangents, weights
):
    """A tangent, compiled: see `_tangent`."""
    return _compiled(_tangent, params, moving, of_weights)(operands, tangents, weights)


def _tangent(
    params: _Params, moving: tuple[int, ...], of_weights: bool, operands, tangents, weights
):
    """A tangent, where the operands `moving` have tangents: that of the value from `contract`,
    sum_j v_j^H dA u_j; or that of the weights, from `weights_at`.
    """

    def push(operands, tangents, weights):
        def of_moving(moved):
            complete = list(operands)
            for i, operand in zip(moving, moved, strict=True):
                complete[i] = operand
            _, operator, estimator = _rebuild(params, complete)
            rule = estimator.weights_at if of_weights else estimator.contract
            return rule(weights, estimator.batched(operator))

        primals = tuple(operands[i] for i in moving)
        return jax.jvp(of_moving, (primals,), (tangents,))[1]

    def in_axes(level):
        return level.axes, tuple(level.axes[i] for i in moving), 0

    with any_promotion():
        return _vmapped(push, params.levels, in_axes)(operands, tangents, weights)


_forever = {
    _implementation: jax.jit(_implementation, static_argnums=0),
    _tangent: jax.jit(_tangent, static_argnums=(0, 1, 2)),
}


@lru_cache(maxsize=4)
def _for_a_while(fn: Callable[..., Any], *static: Any) -> Callable[..., Any]:
    return jax.jit(partial(fn, *static))


def _flat_run(*operands, params):
    # The mesh in use said aloud, as lowering does: both then find the trace of abstract evaluation.
    with use_abstract_mesh(get_abstract_mesh()):
        return jtu.tree_leaves(_run(params, operands))


def _outputs(params, avals):
    """What `_run` returns, as shapes. (From shapes: all callers then share one trace.)"""
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals)
    with use_abstract_mesh(get_abstract_mesh()):
        return jax.eval_shape(partial(_run, params), structs)


def _unflatten(params, operands, outputs):
    """Outputs of the primitive as what `_run` returns."""
    structure = jtu.tree_structure(_outputs(params, [jax.typeof(x) for x in operands]))
    return jtu.tree_unflatten(structure, outputs)


def _abstract_eval(*avals, params):
    outputs = jtu.tree_leaves(_outputs(params, avals))
    return [jax.core.ShapedArray(out.shape, out.dtype) for out in outputs]


def _zero(primal):
    return ad.Zero(jax.core.ShapedArray(jnp.shape(primal), primal.dtype).to_tangent_aval())


def _batch(primitive, vmapped, operands, axes, *, params):
    # An operator that nothing is batched in may still speak of the axis by its name.
    if all(axis is None for axis in axes) and not isinstance(vmapped.name, str):
        outputs = primitive.bind(*operands, params=params)
        return outputs, [None] * len(outputs)
    level = _Level(tuple(axes), vmapped.size, vmapped.name, vmapped.spmd_name)
    outputs = primitive.bind(*operands, params=params._replace(levels=(*params.levels, level)))
    return outputs, [0] * len(outputs)


def _jvp(primitive, primals, tangents, *, params):
    with_weights = params._replace(weights=True)
    # Numbers that `jax.jvp` was given reach this as they are.
    primals, tangents = (
        [jnp.asarray(x) if isinstance(x, int | float | complex) else x for x in values]
        for values in (primals, tangents)
    )
    outputs = primitive.bind(*primals, params=with_weights)
    moving = tuple(
        i
        for i, tangent in enumerate(tangents)
        if type(tangent) is not ad.Zero and tangent.dtype != jax.dtypes.float0
    )
    estimate, weights = _unflatten(with_weights, primals, outputs)
    outputs_t = [_zero(out) for out in outputs]
    count = len(jtu.tree_leaves(estimate))
    if moving:
        moved = tuple(tangents[i] for i in moving)
        operands = (tuple(primals), moved, weights)
        values_t = jtu.tree_leaves(_push_forward(with_weights, moving, False, *operands))
        outputs_t[: len(values_t)] = values_t  # the value comes first among the outputs
        # Asked for the weights: what is differentiated here is a derivative.
        if params.weights and _rebuild(params, primals)[2].weights_depend_on_operator:
            weights_t = _push_forward(with_weights, moving, True, *operands)
            outputs_t[count:] = jtu.tree_leaves(weights_t)
    if not params.weights:
        outputs, outputs_t = outputs[:count], outputs_t[:count]
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


# One for each kind of thing that is estimated: all that differs is the name in a jaxpr.
trace_p = _define("trace")
diagonal_p = _define("diagonal")
summary_p = _define("summary")
spectral_sum_p = _define("spectral_sum")
spectral_density_p = _define("spectral_density")
eigenvalue_count_p = _define("eigenvalue_count")
logdet_p = _define("logdet")
logdet_derivative_p = _define("logdet_directional_derivative")
gaussian_log_density_p = _define("gaussian_log_density")


def bind(
    primitive: Primitive, key: Array, operator: lx.AbstractLinearOperator, k: int, estimator: Any
) -> Estimate:
    """Estimate through a primitive.

    **Arguments:**

    - `primitive`: that of what is estimated, such as `trace_p`.
    - `key`: a scalar random key, typed or raw.
    - `operator`: a checked operator, all of whose arrays are leaves.
    - `k`: the budget, already within bounds.
    - `estimator`: the estimator, whose `compute` (or `exact`, for `k >= n`) does the work.

    **Returns:**

    The estimate, as arrays.
    """
    key_impl = None
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key_impl, key = jax.random.key_impl(key), jax.random.key_data(key)
    tree = closed_functions((key, operator, estimator))
    leaves, treedef = jtu.tree_flatten(tree)
    leaves = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in leaves]
    static = tuple(None if isinstance(leaf, jax.Array) else Static(leaf) for leaf in leaves)
    operands = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    held = max((holds(x.value) for x in static if x is not None), default=NOTHING)
    params = _Params(Static(treedef), static, key_impl, k, False, (), held, needs_devices())

    def estimate(*operands):
        return _unflatten(params, operands, primitive.bind(*operands, params=params))[0]

    return with_auto_axes(estimate, operands, operator.in_size())


def with_rule(
    name: str, fn: Callable[..., Any], ruled: Callable[..., Any], batch: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that XLA is told how to partition, as a primitive: `custom_partitioning` knows
    neither derivatives nor `vmap`.

    **Arguments:**

    - `name`: the name in a jaxpr.
    - `fn`: the function, of arrays, in ordinary JAX operations. It returns a tuple of arrays. Its
        derivative is that of these operations.
    - `ruled`: the same with the rule for its partitioning.
    - `batch`: what it is under `vmap`: `batch(call, size, batched, *arrays)`, where batched arrays
        have a leading axis of this size, as all results do, and `call` is the function returned.

    **Returns:**

    The function.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def call(*arrays):
        # A `shard_map` over some axes of the mesh: rules are not told of the others.
        kinds = set(jax.sharding.get_abstract_mesh().axis_types)
        if AxisType.Manual in kinds and len(kinds) > 1:
            return tuple(fn(*arrays))
        return tuple(primitive.bind(*arrays, inside=needs_devices()))

    def run(*arrays, inside):
        del inside
        return list(ruled(*arrays))

    def abstract(*avals, inside):
        del inside
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(fn, *structs)]

    def push(primals, tangents, *, inside):
        outputs = primitive.bind(*primals, inside=inside)
        moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

        def of_moving(*moved):
            arrays = list(primals)
            for i, x in zip(moving, moved, strict=True):
                arrays[i] = x
            return fn(*arrays)

        moved = tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving)
        return outputs, list(jax.jvp(of_moving, *moved)[1])

    def batched(vmapped, arrays, axes, *, inside):
        if all(axis is None for axis in axes):
            outputs = primitive.bind(*arrays, inside=inside)
            return outputs, [None] * len(outputs)
        if vmapped.spmd_name is not None:  # the axis is cut already: nothing is left to be ruled
            options = {"axis_size": vmapped.size, "spmd_axis_name": vmapped.spmd_name}
            outputs = jax.vmap(fn, tuple(axes), 0, **options)(*arrays)
            return list(outputs), [0] * len(outputs)
        pairs = zip(arrays, axes, strict=True)
        moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in pairs]
        outputs = batch(call, vmapped.size, [axis is not None for axis in axes], *moved)
        return list(outputs), [0] * len(outputs)

    primitive.def_impl(jax.jit(run, static_argnames="inside"))
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = push
    batching.fancy_primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    return call
