"""What identifies a compiled program: code and Python values, never an array.

An estimate is compiled once for all operators that differ in their arrays only. So the arrays must
be operands of the program, and everything else is the key under which the program is found again.
Functions hide arrays, in their closures, defaults and globals: `closed_function` traces them, and
takes the arrays out of the jaxpr.

Two keys are equal only if they stand for the same program (`same`): jaxprs equation by equation,
and what is not understood by identity. A key with such parts may hold arrays (`is_plain`), and its
program is kept for a while only.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from enum import Enum
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import get_abstract_mesh
from jaxtyping import Array

from .devices import (
    automatic_mesh,
    explicit_axes_of,
    explicit_mesh_of,
    replicated,
    with_auto_axes,
)

# --- jaxprs ---------------------------------------------------------------------------------------


def is_jaxpr(value: Any) -> bool:
    """Whether this is a jaxpr. (JAX had two classes of jaxprs, and has one from 0.11 on.)"""
    return hasattr(value, "eqns") and hasattr(value, "debug_info")


def opened(jaxpr: Any) -> Any:
    """The jaxpr without its constants, which are then passed before its arguments."""
    if hasattr(jaxpr, "with_consts"):
        return jaxpr.with_consts(())
    return getattr(jaxpr, "jaxpr", jaxpr)


def variables(jaxpr: Any) -> list[Any]:
    """The variables of the constants of a jaxpr, and of its arguments."""
    return [*opened(jaxpr).constvars, *opened(jaxpr).invars]


def is_literal(atom: Any) -> bool:
    """Whether what an equation reads is a number in the jaxpr, and not a variable."""
    return hasattr(atom, "val")


def _constants(jaxpr: Any) -> list[Any]:
    return list(getattr(jaxpr, "consts", ()))


def _same_jaxpr(a: Any, b: Any) -> bool:
    """Whether two jaxprs are the same up to the names of their variables, with identical constants.

    Functions in an operator are traced anew for every operator that is made. If their jaxprs were
    compared by identity, an estimate in a Python loop would be compiled again in every iteration.
    """
    if not _identical(_constants(a), _constants(b)):
        return False
    numbers: list[dict[Any, int]] = [{}, {}]

    def defined(*variables):
        for known, new in zip(numbers, variables, strict=True):
            known.update((x, len(known) + i) for i, x in enumerate(new))
        return [x.aval for x in variables[0]] == [x.aval for x in variables[1]]

    def same_atoms(xs, ys):
        return len(xs) == len(ys) and all(map(same_atom, xs, ys))

    def same_atom(x, y):
        if is_literal(x) or is_literal(y):
            return type(x) is type(y) and x.aval == y.aval and _same_bits(x.val, y.val)
        return numbers[0][x] == numbers[1][y]

    def same_equation(e, f):
        return (
            e.primitive is f.primitive
            and same_atoms(e.invars, f.invars)
            and e.effects == f.effects
            and e.ctx == f.ctx
            and same(e.params, f.params)
            and defined(e.outvars, f.outvars)
        )

    a, b = opened(a), opened(b)
    return (
        len(a.eqns) == len(b.eqns)
        and defined(variables(a), variables(b))
        and all(map(same_equation, a.eqns, b.eqns))
        and same_atoms(a.outvars, b.outvars)
    )


def _identical(xs: list[Any], ys: list[Any]) -> bool:
    return len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))


def _same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --- equality -------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Whether a program cannot tell two static values apart. (In Python 1, 1.0 and True are equal,
    but programs traced with them differ.)
    """
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, jax.Array | np.ndarray):
        return False
    if is_jaxpr(a):
        return _same_jaxpr(a, b)
    if isinstance(a, float | complex | np.generic):
        return _same_bits(a, b)  # NaN equals NaN, and 0.0 differs from -0.0
    if isinstance(a, jtu.PyTreeDef):
        return a == b and same(static_fields(a), static_fields(b))
    if isinstance(a, jax.core.Trace) or type(a).__name__ in ("TraceTag", "Store", "EqualStore"):
        return True  # left over from a finished trace: no program depends on these
    parts = _parts(a)
    if parts is not None:
        others = _parts(b)
        return others is not None and len(parts) == len(others) and all(map(same, parts, others))
    try:
        return bool(a == b)
    except Exception:  # an object whose comparison is not a truth value
        return False


def static_fields(treedef: Any) -> list[Any]:
    """The static fields of all nodes of a PyTree."""
    data = treedef.node_data()
    return [data, *[static_fields(child) for child in treedef.children()]]


def _parts(value: Any) -> list[Any] | None:
    """What determines a value, or None for one that counts by its own comparison.

    The rule of a `jax.custom_jvp` in a jaxpr is a function of JAX's, made anew at every trace
    around the user's function. It is its code and what it holds. The user's counts by identity.
    """
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, FunctionType) and _is_of_library(value.__module__):
        return [id(value.__code__), *_held(value)]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if hasattr(value, "f_transformed") and hasattr(value, "transforms"):
        return [value.f, value.transforms, value.params]  # JAX's own wrapper around a function
    leaves, treedef = jtu.tree_flatten(value)
    return None if jtu.treedef_is_leaf(treedef) else [treedef, *leaves]


def _held(function: FunctionType) -> list[Any]:
    """What a function holds in its closure and its defaults."""
    names, cells = function.__code__.co_freevars, []
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell that is not filled yet
            if not ("cells" in names and "fn" in names) or name == "fn":  # a cache of `fn`
                cells.append(cell.cell_contents)
    return [*cells, function.__defaults__, function.__kwdefaults__]


_LIBRARIES = frozenset(
    {"builtins", "jax", "jaxlib", "equinox", "lineax", "numpy", "ml_dtypes", "traceax"}
)


def _is_of_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _LIBRARIES


@final
class Static:
    """A value that is no array, such as a leaf, a jaxpr, or the structure of all leaves: hashable,
    and compared by `same`.
    """

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any):
        self.value = value
        try:
            self._hash = hash((type(value), _summary(value) if is_jaxpr(value) else value))
        except TypeError:
            self._hash = hash(type(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and same(self.value, other.value)

    def __hash__(self) -> int:
        return self._hash


def _summary(jaxpr: Any) -> tuple[Any, ...]:
    names = tuple(equation.primitive.name for equation in jaxpr.eqns)
    return names, tuple(str(x.aval) for x in opened(jaxpr).invars)


def is_plain(value: Any, inside: frozenset[int] = frozenset()) -> bool:
    """Whether a value certainly holds no array and cannot change. Functions are plain if all that
    they hold is, and if they name no data among their globals.

    **Arguments:**

    - `value`: anything.
    - `inside`: the identities of the values that this one is a part of.
    """
    if id(value) in inside or isinstance(value, type | Enum | ModuleType):
        return True
    contents = _contents(value)
    return contents is not None and all(is_plain(x, inside | {id(value)}) for x in contents)


def _contents(value: Any) -> list[Any] | None:
    """What a value holds, or None where that is not known, and for an array."""
    if isinstance(value, jax.Array | np.ndarray):
        return None
    if is_jaxpr(value):
        return [*_constants(value), *(equation.params for equation in value.eqns)]
    if isinstance(value, jtu.PyTreeDef):
        return static_fields(value)
    if isinstance(value, Static):
        return [value.value]
    parts = _parts(value)
    if parts is not None:
        return parts
    if isinstance(value, FunctionType):
        named = [value.__globals__.get(name) for name in _names(value.__code__)]
        is_code = [x is None or callable(x) or isinstance(x, ModuleType) for x in named]
        return [*_held(value), *named] if all(is_code) else None
    if not _is_of_library(type(value).__module__):
        return None
    return [getattr(value, name, None) for name in ("__wrapped__", "__self__", "callback_func")]


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in a piece of code."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# --- functions ------------------------------------------------------------------------------------


@final
class ClosedFunction(eqx.Module):
    """A function as a jaxpr and all the arrays that it holds. See `closed_function`."""

    program: Static  # a jaxpr without constants
    constants: list[Array]
    static_outputs: Any  # the results that are no arrays, and None in the places of the others
    outputs: Any = eqx.field(static=True)  # the structure of the results that are arrays
    # The relative precision of products, where the function is one that says so.
    precision: float | None = eqx.field(default=None, static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        arrays = jtu.tree_leaves(eqx.filter((args, kwargs), eqx.is_array))
        own = variables(self.program.value)[len(self.constants) :]
        expected = [(x.aval.shape, x.aval.dtype) for x in own]
        found = [(x.shape, x.dtype) for x in arrays]
        if found != expected:
            raise ValueError(
                f"A function that was traced for {_listed(expected)} got {_listed(found)}. Give it "
                "arrays of these shapes and dtypes, such as a vector like the parameters."
            )
        operands = [*self.constants, *arrays]
        # Outside of `jit` JAX evaluates nothing along automatic axes of a mesh with explicit ones.
        run = _evaluate_compiled if explicit_mesh_of(operands) else _evaluate
        results = with_auto_axes(partial(run, self.program, len(self.constants)), operands)
        return eqx.combine(jtu.tree_unflatten(self.outputs, results), self.static_outputs)


def _evaluate(program: Static, count: int, *operands: Array) -> list:
    """Evaluate a jaxpr; the operands are its `count` constants and its arguments."""
    return jax.core.eval_jaxpr(program.value, operands[:count], *operands[count:])


_evaluate_compiled = jax.jit(_evaluate, static_argnums=(0, 1))


def _listed(arrays: list[tuple[Any, Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in arrays[:8]) or "no arrays"


def is_converted(node: Any) -> bool:
    """Whether this is a function made by `equinox.filter_closure_convert`."""
    return isinstance(node, eqx.Module) and is_jaxpr(getattr(node, "jaxpr", None))


def closed_functions(tree: Any) -> Any:
    """The PyTree with a `ClosedFunction` in place of every converted function, whose jaxpr may hold
    arrays.
    """

    def close(node):
        if not is_converted(node):
            return node
        leaves, structure = node.out_static
        jaxpr, constants = _without_calls(node.jaxpr, node.consts)
        return ClosedFunction(
            program=Static(jaxpr),
            constants=[jnp.asarray(x) for x in constants],
            static_outputs=jtu.tree_unflatten(structure, leaves),
            outputs=node.out_dynamic_struct[1],
        )

    return jtu.tree_map(close, tree, is_leaf=is_converted)


def closed_function(function: Callable[..., Any], *example: Any) -> ClosedFunction:
    """A function as a jaxpr and all the arrays that the function holds.

    **Arguments:**

    - `function`: the function.
    - `example`: arguments to trace it with: arrays, or their structures.
    """
    ways = [(automatic_mesh(), example)]
    if explicit_axes_of(get_abstract_mesh()):
        # The function may name explicit axes, or hold arrays that are cut along them.
        ways += [(nullcontext(), example), (nullcontext(), replicated(example))]

    def convert(mesh, like):
        # Equinox does not trace a function without a closure, so that arrays in its defaults or
        # globals would be missed. This lambda has a closure.
        with mesh:
            return closed_functions(eqx.filter_closure_convert(lambda *x: function(*x), *like))

    for way in ways[:-1]:
        with suppress(AssertionError, ValueError):
            closed = convert(*way)
            break
    else:
        closed = convert(*ways[-1])
    precision = getattr(getattr(function, "__self__", function), "precision", None)
    return dataclasses.replace(closed, precision=precision)


def _without_calls(jaxpr: Any, constants: list[Array]) -> tuple[Any, list[Array]]:
    """The jaxpr and its constants; where it calls `jax.jit` functions that hold arrays, with what
    these do in place of the calls. (JAX itself makes operands of the arrays in its control flow.)
    """
    if not any(map(_is_call_with_constants, jaxpr.eqns)):
        return opened(jaxpr), constants
    own = variables(jaxpr)[len(constants) :]
    structs = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in own]
    inlined = jax.make_jaxpr(partial(_evaluate_inlined, jaxpr, constants))(*structs)
    return opened(inlined), _constants(inlined)


def _is_call_with_constants(equation: Any) -> bool:
    if equation.primitive.name not in ("jit", "pjit"):
        return False
    inner = equation.params["jaxpr"]
    return bool(_constants(inner)) or any(map(_is_call_with_constants, inner.eqns))


def _evaluate_inlined(jaxpr: Any, constants: list[Array], *args: Array) -> list:
    """As `jax.core.eval_jaxpr`, without the calls that hold arrays."""
    jaxpr = opened(jaxpr)
    values = dict(zip(variables(jaxpr), [*constants, *args], strict=True))

    def read(atom):
        return atom.val if is_literal(atom) else values[atom]

    for equation in jaxpr.eqns:
        if _is_call_with_constants(equation):
            inner = equation.params["jaxpr"]
            operands = map(read, equation.invars)
            results = _evaluate_inlined(inner, _constants(inner), *operands)
        else:
            names = list({x: None for x in equation.invars if not is_literal(x)})
            ends = {"constvars": [], "invars": names, "outvars": list(equation.outvars)}
            one = jaxpr.replace(**ends, eqns=[equation])
            results = jax.core.eval_jaxpr(one, (), *map(read, names))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]
