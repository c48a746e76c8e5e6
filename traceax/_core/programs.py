"""What identifies a compiled program: code and Python values, never an array.

An estimate is compiled once for all operators that differ in their arrays only. So the arrays must
be operands of the program, and everything else is the key under which the program is found again.
Arrays that are leaves of an operator are easy to find. Others are hidden:

- in the constants of a jaxpr, and of the jaxprs inside it (where a `jax.jit` function keeps the
  concrete arrays that it closes over). A `Program` is a jaxpr without them, at every depth; they
  are passed to it when it is evaluated;
- in the closures, defaults, globals and attributes of Python functions. `closed_function` converts
  the functions in lineax operators to jaxprs. Functions that cannot be converted are compared by
  identity, together with the arrays in them (see `Held`).

Two keys are equal only if they stand for the same program. Where that cannot be seen the keys
differ, which costs one more compilation.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.sharding import (
    AbstractMesh,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    use_abstract_mesh,
)
from jaxtyping import Array

from .devices import (
    automatic_mesh,
    explicit_axes_of,
    explicit_mesh_of,
    replicated,
    with_auto_axes,
)
from .precision import at_least_single, eps_of_factors

# --- equality -------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Whether a program cannot tell two static values apart. (In Python 1, 1.0 and True are equal,
    but programs traced with them differ.)
    """
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, jax.Array):
        return False
    if is_jaxpr(a):
        return _same_jaxpr(a, b) and same(_constants(a), _constants(b))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return a.hex() == b.hex()  # NaN equals NaN, and 0.0 differs from -0.0
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, jtu.PyTreeDef):
        return a == b and same(static_fields(a), static_fields(b))
    if isinstance(a, jax.core.Trace) or type(a).__name__ in ("TraceTag", "Store", "EqualStore"):
        return True  # left over from a finished trace: no program depends on these
    parts = _parts(a)
    if parts is not None:
        return same(parts, _parts(b))
    try:
        return bool(a == b)
    except Exception:  # an object whose comparison is not a truth value
        return False


def static_fields(treedef: Any) -> list[Any]:
    """The static fields of all nodes of a PyTree."""
    data = treedef.node_data()
    return [data, *[static_fields(child) for child in treedef.children()]]


def _parts(value: Any) -> tuple[Any, ...] | None:
    """The code and the contents of a function that JAX or Equinox has made, which together
    determine its values, or of an equation in such a function; None for any other value.

    The rule of a `jax.custom_jvp` in a jaxpr is such a function. It is made anew at every trace,
    around a function that the user wrote. The user's function is compared by identity, because
    what it holds may change.
    """
    if isinstance(value, FunctionType):
        if value.__module__.partition(".")[0] not in ("jax", "equinox"):
            return None
        names = value.__code__.co_freevars
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        if "cells" in names and "fn" in names:  # a function that caches the results of `fn`
            cells = [cells[names.index("fn")]]
        return _Identity(value.__code__), cells, value.__defaults__, value.__kwdefaults__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if hasattr(value, "f_transformed") and hasattr(value, "transforms"):
        return value.f, value.transforms, value.params  # JAX's own wrapper around a function
    if hasattr(value, "primitive") and hasattr(value, "invars"):  # an equation that a rule holds
        known = list(value.invars)
        atoms = [(str(x.aval), x.val if _is_literal(x) else known.index(x)) for x in known]
        return value.primitive, value.params, atoms, [str(x.aval) for x in value.outvars]
    return None


@final
class _Identity:
    """A code object that equals only itself. (Python compares code objects by their contents.)"""

    __slots__ = ("value",)

    def __init__(self, value: CodeType):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _same_jaxpr(a: Any, b: Any) -> bool:
    """Whether two jaxprs are the same up to the names of their variables.

    Functions in an operator are jaxprs (lineax and `traceax.curvature` convert closures), traced
    anew for every operator that is made. If they were compared by identity, an estimate in a
    Python loop would be compiled again in every iteration.
    """
    renamed: dict[Any, Any] = {}

    def defines(xs, ys):
        renamed.update(zip(xs, ys, strict=True))
        return all(x.aval == y.aval for x, y in zip(xs, ys, strict=True))

    def same_atom(x, y):
        if _is_literal(x) or _is_literal(y):
            return type(x) is type(y) and x.aval == y.aval and same(x.val, y.val)
        return renamed.get(x) is y

    def same_equation(e, f):
        return (
            e.primitive is f.primitive
            and len(e.invars) == len(f.invars)
            and len(e.outvars) == len(f.outvars)
            and e.effects == f.effects
            and (e.ctx is f.ctx or e.ctx == f.ctx)
            and all(map(same_atom, e.invars, f.invars))
            and same(e.params, f.params)
            and defines(e.outvars, f.outvars)
        )

    a, b = getattr(a, "jaxpr", a), getattr(b, "jaxpr", b)
    return a is b or (
        [len(x) for x in (a.constvars, a.invars, a.outvars, a.eqns)]
        == [len(x) for x in (b.constvars, b.invars, b.outvars, b.eqns)]
        and defines([*a.constvars, *a.invars], [*b.constvars, *b.invars])
        and all(map(same_equation, a.eqns, b.eqns))
        and all(map(same_atom, a.outvars, b.outvars))
    )


@final
class Static:
    """A leaf that is not an array, or the structure of all leaves: hashable, and compared by
    `same`.
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


# --- jaxprs ---------------------------------------------------------------------------------------


def is_jaxpr(value: Any) -> bool:
    """Whether this is a jaxpr. (JAX had two classes of jaxprs, and has one from 0.11 on.)"""
    return hasattr(value, "eqns") and hasattr(value, "debug_info")


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def _constants(jaxpr: Any) -> list[Any]:
    return list(getattr(jaxpr, "consts", ()))


def _opened(jaxpr: Any) -> Any:
    """The jaxpr without its constants, which are then passed before its arguments."""
    if hasattr(jaxpr, "with_consts"):
        return jaxpr.with_consts(())
    return getattr(jaxpr, "jaxpr", jaxpr)


def _summary(jaxpr: Any) -> tuple[Any, ...]:
    names = tuple(equation.primitive.name for equation in jaxpr.eqns)
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return names, tuple(str(x.aval) for x in jaxpr.invars)


def _jaxprs_in(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation that are jaxprs, or sequences of them."""

    def has_jaxpr(value):
        several = isinstance(value, tuple | list)
        return any(map(is_jaxpr, value)) if several else is_jaxpr(value)

    return {name: value for name, value in params.items() if has_jaxpr(value)}


def _hides_constants(jaxpr: Any) -> bool:
    """Whether a jaxpr, or one inside it, has constants of its own."""
    return bool(_constants(jaxpr)) or any(_is_special(equation) for equation in jaxpr.eqns)


def _is_special(equation: Any) -> bool:
    """Whether constants can and must be taken out of the jaxprs in this equation, or the jaxprs
    have to be traced anew in another mesh.
    """
    if equation.primitive.name not in _EVALUATE:
        return False
    inner = jtu.tree_leaves(list(_jaxprs_in(equation.params).values()))
    return any(map(_hides_constants, inner)) or any(map(_must_leave_mesh, inner))


def _must_leave_mesh(jaxpr: Any) -> bool:
    """Whether a jaxpr was traced in a mesh with explicit axes, or with automatic ones in their
    place: inside of an estimate these axes are automatic, and outside explicit.
    """
    explicit = bool(explicit_axes_of(get_abstract_mesh()))
    return explicit and any(not e.ctx.cur_abstract_mesh.empty for e in jaxpr.eqns)


def _without_mesh(equation: Any) -> Any:
    """The equation as if it had been traced without a mesh."""
    with equation.ctx.manager, use_abstract_mesh(AbstractMesh((), ())):
        context = type(equation.ctx)()
    inner = {
        name: tuple(map(_traced_anew, x)) if isinstance(x, tuple | list) else _traced_anew(x)
        for name, x in _jaxprs_in(equation.params).items()
    }
    is_hint = equation.primitive.name in _HINTS
    named = {
        name: x.spec if is_hint else None
        for name, x in equation.params.items()
        if isinstance(x, NamedSharding)
    }
    return equation.replace(params={**equation.params, **named, **inner}, ctx=context)


def _traced_anew(jaxpr: Any) -> Any:
    structs = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in _opened(jaxpr).invars]
    run = partial(Program(jaxpr).evaluate, take_constants(jaxpr), _constants(jaxpr))
    with use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(run)(*structs)


@final
class Program:
    """A jaxpr without arrays: what `jax.make_jaxpr` returns, less its constants and those of all
    the jaxprs inside it.

    Hashable; two programs are equal if they compute the same. JAX itself makes operands of the
    constants in the bodies of its control flow. What is left are the arrays that a `jax.jit`
    function closes over, wherever that function is called.
    """

    __slots__ = ("_hash", "jaxpr")

    def __init__(self, jaxpr: Any):
        """From a jaxpr, whose constants are dropped. `take_constants` returns the inner ones."""
        opened = _opened(jaxpr)
        if any(map(_is_special, opened.eqns)):
            opened = opened.replace(eqns=[_without_constants(e) for e in opened.eqns])
        if _must_leave_mesh(opened):
            opened = opened.replace(eqns=[_without_mesh(equation) for equation in opened.eqns])
        self.jaxpr = opened
        self._hash = hash(_summary(opened))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and _same_jaxpr(self.jaxpr, other.jaxpr)

    def __hash__(self) -> int:
        return self._hash

    @property
    def num_constants(self) -> int:
        """The number of constants of all the jaxprs inside, without those of the jaxpr itself."""
        return sum(p.num_constants + p.own for p in self._inner())

    @property
    def arguments(self) -> list[Any]:
        """The variables of the arguments."""
        return [*self.jaxpr.constvars, *self.jaxpr.invars]

    def _inner(self) -> list["_Inner"]:
        programs = [list(e.params.values()) for e in self.jaxpr.eqns]
        return [x for x in jtu.tree_leaves(programs) if isinstance(x, _Inner)]

    def evaluate(self, hidden: Sequence[Array], constants: Sequence[Array], *args: Array) -> list:
        """Evaluate the program, in a trace.

        **Arguments:**

        - `hidden`: the constants of the jaxprs inside, in the order of `take_constants`.
        - `constants`: the constants of the jaxpr itself.
        - `args`: the arguments.

        **Returns:**

        The results.
        """
        jaxpr = self.jaxpr
        if not any(map(_has_inner, jaxpr.eqns)):
            return jax.core.eval_jaxpr(jaxpr, constants, *args)
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True))

        def read(atom):
            return atom.val if _is_literal(atom) else values[atom]

        hidden = list(hidden)
        for equation in jaxpr.eqns:
            operands = [read(x) for x in equation.invars]
            if _has_inner(equation):
                params = jtu.tree_map(
                    lambda x: _bind_constants(x, hidden) if isinstance(x, _Inner) else x,
                    equation.params,
                    is_leaf=lambda x: isinstance(x, _Inner),
                )
                results = _EVALUATE[equation.primitive.name](equation, params, operands)
            else:
                variables = list({x: None for x in equation.invars if not _is_literal(x)})
                one = {"constvars": [], "invars": variables, "outvars": list(equation.outvars)}
                results = jax.core.eval_jaxpr(
                    jaxpr.replace(**one, eqns=[equation]), (), *[values[x] for x in variables]
                )
            values.update(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]


@final
class _Inner:
    """A program inside another: it replaces a jaxpr with constants in an equation."""

    __slots__ = ("own", "program")

    def __init__(self, jaxpr: Any):
        self.program = Program(jaxpr)
        self.own = len(_constants(jaxpr))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inner) and self.own == other.own and self.program == other.program

    def __hash__(self) -> int:
        return hash(self.program)

    @property
    def jaxpr(self) -> Any:
        return self.program.jaxpr

    @property
    def num_constants(self) -> int:
        return self.program.num_constants


def _inner_or_same(value: Any) -> Any:
    if is_jaxpr(value):
        return _Inner(value)
    return tuple(map(_inner_or_same, value)) if isinstance(value, tuple | list) else value


def _without_constants(equation: Any) -> Any:
    """The equation; if one of its jaxprs has constants, with a program in place of each jaxpr."""
    if not _is_special(equation):
        return equation
    inner = {name: _inner_or_same(x) for name, x in _jaxprs_in(equation.params).items()}
    return equation.replace(params={**equation.params, **inner})


def _has_inner(equation: Any) -> bool:
    """Whether this equation is evaluated here: see `_EVALUATE`."""
    inner = [isinstance(x, _Inner) for x in jtu.tree_leaves(list(equation.params.values()))]
    return equation.primitive.name in _EVALUATE and (any(inner) or _is_hint(equation))


# Equations that say how an array is to be cut, and the parameter that says it.
_HINTS = {"reshard": "dst_sharding", "sharding_constraint": "sharding"}


def _is_hint(equation: Any) -> bool:
    """Whether the equation says how an array is to be cut in a mesh that was left."""
    name = _HINTS.get(equation.primitive.name)
    return name is not None and isinstance(equation.params[name], PartitionSpec)


def _bind_constants(inner: _Inner, hidden: list[Array]) -> Callable[..., list]:
    """An inner program as a function, with its constants, which are taken from the front of
    `hidden`.
    """
    shares = []
    for count in (inner.own, inner.num_constants):
        shares.append(hidden[:count])
        del hidden[:count]
    own, deeper = shares
    return partial(inner.program.evaluate, deeper, own)


def take_constants(jaxpr: Any) -> list[Array]:
    """The constants of all the jaxprs inside a jaxpr, in the order of its equations."""
    found: list[Array] = []

    def take(value):
        for inner in value if isinstance(value, tuple | list) else [value]:
            if is_jaxpr(inner):
                found.extend(jnp.asarray(x) for x in _constants(inner))
                found.extend(take_constants(inner))

    for equation in jaxpr.eqns:
        if _is_special(equation):
            for value in equation.params.values():
                take(value)
    return found


# How to evaluate an equation whose jaxprs became functions with constants bound to them: call the
# function of `jax` that such an equation comes from, which makes operands of the constants.


def _call(equation, params, operands):
    del equation
    return params["jaxpr"](*operands)


def _hint(equation, params, operands):
    spec, mesh = params[_HINTS[equation.primitive.name]], get_abstract_mesh()
    if mesh.empty or explicit_axes_of(mesh):
        return operands
    return [lax.with_sharding_constraint(x, spec) for x in operands]


def _checkpoint(equation, params, operands):
    del equation
    options = {name: params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(params["jaxpr"], **options)(*operands)


def _cond(equation, params, operands):
    del equation
    index, *operands = operands
    return lax.switch(index, params["branches"], *operands)


def _while(equation, params, operands):
    del equation
    c, b = params["cond_nconsts"], params["body_nconsts"]
    for_cond, for_body, carry = operands[:c], operands[c : c + b], operands[c + b :]
    return lax.while_loop(
        lambda carry: params["cond_jaxpr"](*for_cond, *carry)[0],
        lambda carry: params["body_jaxpr"](*for_body, *carry),
        carry,
    )


def _scan(equation, params, operands):
    # The operands are constants, then the carry, then what is scanned over. Outside of the body the
    # last of these have one more axis.
    inner = equation.params["jaxpr"].program.jaxpr
    variables = [*inner.constvars, *inner.invars][-len(operands) :]
    ndim = [len(x.aval.shape) for x in variables]
    outer = [len(x.aval.shape) for x in equation.invars]
    scanned = sum(o != i for o, i in zip(outer, ndim, strict=True))
    pairs = zip(equation.outvars, inner.outvars, strict=True)
    num_carry = sum(len(x.aval.shape) == len(y.aval.shape) for x, y in pairs)
    end = len(operands) - scanned
    constants, carry = operands[: end - num_carry], operands[end - num_carry : end]

    def body(carry, x):
        results = params["jaxpr"](*constants, *carry, *x)
        return results[:num_carry], results[num_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(body, list(carry), list(operands[end:]), **options)
    return [*carry, *stacked]


_EVALUATE: dict[str, Callable[..., Any]] = {
    "jit": _call,
    "pjit": _call,
    "closed_call": _call,
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "reshard": _hint,
    "sharding_constraint": _hint,
}


# --- functions ------------------------------------------------------------------------------------


@final
class ClosedFunction(eqx.Module):
    """A function made by `equinox.filter_closure_convert`, as a program and its constants."""

    shell: Any  # the converted function without its jaxpr and constants
    program: Program
    hidden: list[Array]
    constants: list[Array]
    # The relative precision of products, where the function is one that says so.
    precision: float | None = eqx.field(default=None, static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. (Not as Equinox does, whose check of the arguments refuses arrays in
        a mesh that the example was not in.)
        """
        arrays = jtu.tree_leaves(eqx.filter((args, kwargs), eqx.is_array))
        variables = self.program.arguments[len(self.constants) :]
        expected = [(x.aval.shape, x.aval.dtype) for x in variables]
        found = [(x.shape, x.dtype) for x in arrays]
        if found != expected:
            raise ValueError(
                f"A function that was traced for {_listed(expected)} got {_listed(found)}. Give it "
                "arrays of these shapes and dtypes, such as a vector like the parameters."
            )
        operands = [*arrays, *self.constants, *self.hidden]
        ends = len(arrays), len(arrays) + len(self.constants)
        # Outside of `jit` JAX evaluates nothing along automatic axes of a mesh with explicit ones.
        run = _evaluate_compiled if explicit_mesh_of(operands) else _evaluate
        results = with_auto_axes(partial(run, self.program, ends), operands)
        structure, static = map(_tree, (self.shell.out_dynamic_struct, self.shell.out_static))
        return eqx.combine(jtu.tree_unflatten(jtu.tree_structure(structure), results), static)


def _evaluate(program: Program, ends: tuple[int, int], *operands: Array) -> list:
    """Evaluate a program; the operands are the arguments, its constants, and the hidden ones."""
    arguments, constants = operands[: ends[0]], operands[ends[0] : ends[1]]
    return program.evaluate(operands[ends[1] :], constants, *arguments)


_evaluate_compiled = jax.jit(_evaluate, static_argnums=(0, 1))


def _tree(flat: tuple[list[Any], Any]) -> Any:
    leaves, treedef = flat
    return jtu.tree_unflatten(treedef, leaves)


def _listed(arrays: list[tuple[Any, Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in arrays[:8]) or "no arrays"


def _contents(converted: Any) -> tuple[Any, Any]:
    return converted.jaxpr, converted.consts


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
        jaxpr, constants = _contents(node)
        shell = eqx.tree_at(_contents, node, (None, None))
        arrays = [jnp.asarray(x) for x in constants]
        return ClosedFunction(shell, Program(jaxpr), take_constants(jaxpr), arrays)

    return jtu.tree_map(close, tree, is_leaf=is_converted)


def closed_function(function: Callable[..., Any], *example: Any) -> ClosedFunction:
    """A function as a program and all the arrays that the function holds.

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
            return eqx.filter_closure_convert(lambda *args: function(*args), *like)

    for way in ways[:-1]:
        with suppress(AssertionError, ValueError):
            converted = convert(*way)
            break
    else:
        converted = convert(*ways[-1])
    return closed_functions(converted)


# Equations that hand on their operands, one by one, to the one jaxpr in them.
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
)


# Equations that have a parameter `precision`.
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


def eps_along(function: Any, *args: tuple[Any, bool]) -> float:
    """The rounding that an argument meets on its way through a function: the largest `eps` among
    the dtypes of all the values that depend on it. (Half precision inside of a function of float32
    does not show in the dtypes of its arguments and results.) Factors in products of matrices count
    with the precision that they keep there: on a GPU float32 is multiplied as TF32, unless the user
    asks for more.

    **Arguments:**

    - `function`: the function, which is traced unless it was converted.
    - `args`: of each argument the value or its structure, and whether it is followed.

    **Returns:**

    A float; 0 if there is no floating dtype.
    """
    if not isinstance(function, ClosedFunction) and not is_converted(function):
        function = closed_function(function, *(value for value, _ in args))
    closed = isinstance(function, ClosedFunction)
    jaxpr = function.program.jaxpr if closed else function.jaxpr
    followed = [
        follow
        for value, follow in args
        for leaf in jtu.tree_leaves(value)
        if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    return _eps_along(_opened(jaxpr), followed)[0]


def eps_of_product(function: Any, *args: tuple[Any, bool]) -> float:
    """The relative precision of a product that a function makes: that of `eps_along`, and twice
    that if it is coarser than the argument in single precision, as a function rounds more than
    once.

    **Arguments:**

    - `function`, `args`: as for `eps_along`.

    **Returns:**

    A float; 0 if there is no floating dtype.
    """
    eps = eps_along(function, *args)
    leaves = [leaf for value, follow in args if follow for leaf in jtu.tree_leaves(value)]
    own = [at_least_single(x.dtype) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    return 2 * eps if eps > max((float(jnp.finfo(x).eps) for x in own), default=eps) else eps


def _eps_inside(equation: Any) -> float:
    """The rounding in an equation that the dtype of its results does not show."""
    if equation.primitive.name == "reduce_precision":
        return 2.0 ** -equation.params["mantissa_bits"]
    if equation.primitive.name not in _PRODUCTS:
        return 0.0
    return eps_of_factors(equation.params["precision"], [x.aval.dtype for x in equation.invars])


def _eps_along(jaxpr: Any, followed: list[bool]) -> tuple[float, list[bool]]:
    """The largest `eps` among the values that depend on some of the last arguments of a jaxpr, and
    which of its results do.
    """
    variables = [*jaxpr.constvars, *jaxpr.invars]
    last = variables[len(variables) - len(followed) :]
    moving = {x for x, follow in zip(last, followed, strict=True) if follow}
    worst = 0.0
    for equation in jaxpr.eqns:
        moves = [not _is_literal(x) and x in moving for x in equation.invars]
        if not any(moves):
            continue
        results = [True] * len(equation.outvars)
        for value in jtu.tree_leaves(list(equation.params.values())):
            if not is_jaxpr(value) and not isinstance(value, _Inner):
                continue
            inner = _opened(value)
            fits = len(inner.outvars) == len(results) and len(moves) <= len(inner.invars)
            if equation.primitive.name in _CALLS and fits:
                eps, results = _eps_along(inner, moves)
            else:  # what a loop carries may depend on all of its operands
                eps, _ = _eps_along(inner, [True] * len(inner.invars))
            worst = max(worst, eps)
        for x, depends in zip(equation.outvars, results, strict=True):
            if depends:
                moving.add(x)
                dtype = getattr(x.aval, "dtype", None)
                if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                    worst = max(worst, float(jnp.finfo(dtype).eps))
        worst = max(worst, _eps_inside(equation))
    return worst, [not _is_literal(x) and x in moving for x in jaxpr.outvars]


#: What `holds` finds in a value, where JAX does not look.
NOTHING, ARRAYS, TRACERS = range(3)

# Types of objects that hold no array that a program depends on.
_CODE = type, ModuleType, jax.sharding.Mesh, jax.sharding.AbstractMesh, jax.sharding.Sharding
_CODE = *_CODE, jax.core.Trace, np.dtype

# A value that holds more objects than this is assumed to hold an array, for which `_MORE` stands.
_FEW, _MORE = 2000, object()

# Libraries whose functions hold no arrays of the user in their globals.
_LIBRARIES = frozenset({"jax", "jaxlib", "numpy", "scipy", "equinox", "lineax", "jaxtyping"})


def _arrays_in(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """The arrays in a value, without those in objects that were `seen` before (by identity); and
    `_MORE`, if there are too many objects to look at all of them.
    """
    for leaf in jtu.tree_leaves(value):
        if isinstance(leaf, jax.Array | np.ndarray):
            yield leaf
    if id(value) in seen or isinstance(value, _CODE):
        return
    seen[id(value)] = value
    if len(seen) > _FEW:
        yield _MORE
        return
    for item in _held(value):
        yield from _arrays_in(item, seen)


def holds(value: Any) -> int:
    """Whether there are arrays in a value, and whether some of them are traced.

    **Arguments:**

    - `value`: anything. Functions are searched: their closures, their defaults, the globals that
        they name, the object that they are methods of, and what they wrap. Of callable objects
        the attributes are.

    **Returns:**

    `NOTHING`, `ARRAYS` or `TRACERS`.
    """
    return _level_of(_arrays_in(value, {}))


def _level_of(arrays: Iterable[Any]) -> int:
    level = NOTHING
    for array in arrays:
        if isinstance(array, jax.core.Tracer):
            return TRACERS
        level = ARRAYS
    return level


@final
class Held:
    """The arrays that static values hold where JAX does not look. They are part of a program that
    was compiled with these values: with other arrays in their place, or with other numbers in a
    NumPy array, it is another program.
    """

    __slots__ = ("arrays", "level")

    def __init__(self, *values: Any):
        """From static values, and from structures of PyTrees, whose static fields are searched."""
        found = []
        for value in values:
            value = static_fields(value) if isinstance(value, jtu.PyTreeDef) else value
            found += _arrays_in(value, {})
        self.level = _level_of(found)
        # A program with tracers is compiled for one call, and must not keep them.
        self.arrays = () if self.level == TRACERS else tuple(map(_frozen, found))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Held)
            and self.level == other.level
            and same(self.arrays, other.arrays)
        )

    def __hash__(self) -> int:
        return hash((self.level, len(self.arrays)))


def _frozen(array: Any) -> Any:
    """The array or, as a NumPy array may change in place, a digest of it."""
    if not isinstance(array, np.ndarray):
        return array
    return array.dtype, array.shape, hashlib.blake2b(array.tobytes()).digest()


def _held(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if value.__module__ is None or value.__module__.partition(".")[0] not in _LIBRARIES:
            names = value.__code__.co_names
            held += [value.__globals__[name] for name in names if name in value.__globals__]
        return held
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if is_jaxpr(value):
        parameters = [list(equation.params.values()) for equation in value.eqns]
        return [*_constants(value), *[x for x in jtu.tree_leaves(parameters) if _may_hold(x)]]
    if isinstance(value, _Inner | Program):
        return [value.jaxpr]
    if hasattr(value, "f_transformed") and hasattr(value, "transforms"):
        return [value.f, list(value.transforms)]
    if callable(value):
        return [*getattr(value, "__dict__", {}).values(), getattr(value, "__wrapped__", None)]
    leaves = jtu.tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:  # an object of a class that JAX does not know
        return list(getattr(value, "__dict__", {}).values())
    return [leaf for leaf in leaves if _may_hold(leaf)]


def _may_hold(value: Any) -> bool:
    slots = isinstance(value, _Inner | Program) or is_jaxpr(value)
    return slots or callable(value) or hasattr(value, "__dict__")


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
