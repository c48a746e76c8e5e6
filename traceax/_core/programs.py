"""What identifies a compiled program: code and Python values, never an array.

An estimate is compiled once for all operators that differ in their arrays only. So the arrays must
be operands of the program, and everything else is the key under which the program is found again.
Functions hide arrays, in their closures, defaults and globals: `closed_function` traces them, and
takes the arrays out of the jaxpr.

Two keys are equal only if they stand for the same program (`same`): jaxprs equation by equation,
and what is not understood by identity. A key with such parts may hold arrays (`is_plain`), and its
program is kept for a while only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
    with_explicit_axes,
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


def _described(jaxpr: Any) -> list[Any]:
    """A jaxpr without the names of its variables: every new operator traces its functions anew."""
    numbers: dict[Any, int] = {}
    arguments = _numbered(variables(jaxpr), numbers)
    equations = [_described_equation(equation, numbers) for equation in jaxpr.eqns]
    return [arguments, *equations, _numbered(opened(jaxpr).outvars, numbers), *_constants(jaxpr)]


def _described_equation(equation: Any, numbers: dict[Any, int]) -> list[Any]:
    ends = [_numbered(atoms, numbers) for atoms in (equation.invars, equation.outvars)]
    return [equation.primitive, equation.params, equation.effects, equation.ctx, *ends]


def _numbered(atoms: Sequence[Any], ids: dict[Any, int]) -> list[Any]:
    """Variables by number and `aval`, literals by their bits."""
    found = [x.aval for x in atoms]
    for x in atoms:
        found.append(np.asarray(x.val).tobytes() if is_literal(x) else ids.setdefault(x, len(ids)))
    return found


# --- equality -------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Whether a program cannot tell two static values apart (as it can 1, 1.0 and True)."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, jax.Array | np.ndarray):
        return False
    if isinstance(a, float | complex | np.generic):  # NaN equals NaN, and 0.0 differs from -0.0
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
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


def _parts(value: Any) -> list[Any] | None:
    """What determines a value, or None for a value that is compared by its own `==`.

    The rule of a `jax.custom_jvp` in a jaxpr is a function of JAX's around the user's, made anew at
    every trace. Its code and contents count; the user's function counts by identity.
    """
    if is_jaxpr(value):
        return _described(value)
    if hasattr(value, "primitive") and hasattr(value, "invars"):  # an equation that a rule holds
        return _described_equation(value, {})
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, FunctionType) and _is_of_library(value.__globals__.get("__name__")):
        return [id(value.__code__), *_held(value)]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if hasattr(value, "f_transformed") and hasattr(value, "transforms"):
        return [value.f, value.transforms, value.params]  # pyright: ignore  # JAX's own wrapper
    if isinstance(value, jtu.PyTreeDef):  # the type of the node, its static fields, its children
        return [value.node_data(), *value.children()]  # pyright: ignore
    leaves, treedef = jtu.tree_flatten(value)
    return None if jtu.treedef_is_leaf(treedef) else [treedef, *leaves]


def _held(function: FunctionType) -> list[Any]:
    """What a function holds in its closure and its defaults."""
    names = function.__code__.co_freevars
    cells = []
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell that is not filled yet
            if not ("cells" in names and "fn" in names) or name == "fn":  # a cache of `fn`
                cells.append(cell.cell_contents)
    return [*cells, function.__defaults__, function.__kwdefaults__]


_LIBRARIES = {"builtins", "jax", "jaxlib", "equinox", "lineax", "numpy", "ml_dtypes", "traceax"}


def _is_of_library(module: str | None) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


@final
class Static:
    """A value that is no array, such as a leaf or a jaxpr: hashable, and compared by `same`."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any):
        self.value = value
        names = tuple(e.primitive.name for e in value.eqns) if is_jaxpr(value) else value
        try:
            self._hash = hash((type(value), names))
        except TypeError:
            self._hash = hash(type(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and same(self.value, other.value)

    def __hash__(self) -> int:
        return self._hash


def is_plain(value: Any, seen: dict[int, Any] | None = None) -> bool:
    """Whether a value certainly holds no array and cannot change. A function is plain if everything
    it holds is, and if it names no data among its globals. (`seen`: values under way.)
    """
    seen = {} if seen is None else seen
    if id(value) in seen or isinstance(value, type | Enum | ModuleType):
        return True
    seen[id(value)] = value
    contents = _contents(value)
    return contents is not None and all(is_plain(x, seen) for x in contents)


def _contents(value: Any) -> list[Any] | None:
    """What a value holds that may be an array, or None for an array and where it is not known."""
    if isinstance(value, jax.Array | np.ndarray):
        return None
    if is_jaxpr(value):
        return [*_constants(value), *(equation.params for equation in value.eqns)]
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
    """The names of globals (and attributes) in a piece of code, in functions inside of it, too."""
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
        expected = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in own]
        found = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        if found != expected:
            raise ValueError(
                f"A function that was traced for {expected} got {found}. Give it arrays of these "
                "shapes and dtypes, such as a vector like the parameters."
            )
        operands = [*self.constants, *arrays]
        # Outside of `jit` JAX evaluates nothing along automatic axes of a mesh with explicit ones.
        evaluate = _evaluate_compiled if explicit_mesh_of(operands) else _evaluate
        results = with_auto_axes(partial(evaluate, self.program, len(self.constants)), operands)
        return eqx.combine(jtu.tree_unflatten(self.outputs, results), self.static_outputs)


def _evaluate(program: Static, count: int, *operands: Array) -> list:
    """Evaluate a jaxpr; the operands are its `count` constants and its arguments."""
    jaxpr = program.value

    def fn(*operands):
        return jax.core.eval_jaxpr(jaxpr, operands[:count], *operands[count:])

    meshes = [equation.ctx.cur_abstract_mesh for equation in jaxpr.eqns]
    specs = [x.aval.sharding.spec for x in variables(jaxpr)]
    return with_explicit_axes(fn, operands, specs, next(filter(explicit_axes_of, meshes), None))


_evaluate_compiled = jax.jit(_evaluate, static_argnums=(0, 1))


def is_converted(node: Any) -> bool:
    """Whether this is a function made by `equinox.filter_closure_convert`."""
    return isinstance(node, eqx.Module) and is_jaxpr(getattr(node, "jaxpr", None))


def closed_functions(tree: Any) -> Any:
    """The PyTree with a `ClosedFunction` for every converted function, whose jaxpr may hold arrays.
    `out_static` and `out_dynamic_struct` are fields of Equinox.
    """

    def close(node):
        if not is_converted(node):
            return node
        jaxpr, constants = _without_calls(node.jaxpr, node.consts)
        static_leaves, treedef = node.out_static
        return ClosedFunction(
            program=Static(jaxpr),
            constants=[jnp.asarray(x) for x in constants],
            static_outputs=jtu.tree_unflatten(treedef, static_leaves),
            outputs=node.out_dynamic_struct[1],
        )

    return jtu.tree_map(close, tree, is_leaf=is_converted)


def closed_function(function: Callable[..., Any], *example: Any) -> ClosedFunction:
    """A function as a jaxpr and all the arrays that it holds, traced with arguments like these."""

    def convert(*like):
        # Equinox does not trace a function without a closure, so that arrays in its defaults or
        # globals would be missed. This lambda has a closure.
        return closed_functions(eqx.filter_closure_convert(lambda *x: function(*x), *like))

    try:
        with automatic_mesh():
            return convert(*example)
    except (AssertionError, ValueError):
        if not explicit_axes_of(get_abstract_mesh()):
            raise
        # The function names explicit axes, or holds arrays that are cut along them.
        return convert(*replicated(example))


def _without_calls(jaxpr: Any, constants: list[Array]) -> tuple[Any, list[Array]]:
    """The jaxpr and its constants, with calls of `jax.jit` functions that hold arrays replaced by
    what the functions do. (JAX itself makes operands of the arrays in control flow.)
    """
    if not any(map(_is_call_with_constants, jaxpr.eqns)):
        return opened(jaxpr), constants
    own = variables(jaxpr)[len(constants) :]
    structs = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in own]
    inlined = jax.make_jaxpr(partial(_evaluate_inlined, jaxpr, constants))(*structs)
    return opened(inlined), _constants(inlined)


def _is_call_with_constants(equation: Any) -> bool:
    is_call = equation.primitive.name in ("jit", "pjit")
    inner: Any = equation.params["jaxpr"] if is_call else None
    return is_call and (bool(_constants(inner)) or any(map(_is_call_with_constants, inner.eqns)))


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
            ends = {"invars": names, "outvars": list(equation.outvars)}
            one = jaxpr.replace(constvars=[], **ends, eqns=[equation])
            results = jax.core.eval_jaxpr(one, (), *map(read, names))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]
