"""Algorithms that can go on with further probes, without making a product again.

Their arrays have room for the most probes that a run may draw, so that one program serves all
sizes. Vectors are the rows of these arrays, and a panel is some rows that follow each other. Rows
that are not in use are 0.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, get_type_hints

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from equinox import AbstractVar
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.control_flow import keep
from .._core.estimate import Estimate, if_wanted, make_estimate, rounding_of
from .._linalg.factorisations import complete_qr, divide_by_upper, panel_qr, qr
from .._operators.block_operator import BlockOperator
from .._operators.width import batch_width, calls_functions
from .._probes.samplers import AbstractSampler
from .._sketch.columns import Columns, all_columns
from .._sketch.leave_one_out import adjoint, matmul
from .._sketch.weights import AbstractWeights, PanelWeights
from .calibration import Calibration
from .rows import Rows

#: The least and the largest number of probes in a panel. With fewer, their scatter says too little.
NARROW, PANEL = 10, 16

#: Panels may leave over this part of the probes that a budget allows.
SPARE = 16

#: The number of panels that are multiplied, or projected on, at once where there are so many.
TOGETHER = 8


class Growth:
    """The panels that a stage of a run adds: those from `start` to `stop`. (It is not a PyTree, as
    it exists only during a trace.)

    A fixed budget (without `probes`) has a single panel, of all probes: nothing is then a loop, or
    traced.
    """

    def __init__(
        self,
        keys: Callable[[Any], PRNGKeyArray],
        width: int,
        room: int,
        start: Any = 0,
        stop: Any = 1,
        stage: Any = 0,
        probes: Sequence[int] = (),
        rest: int = 0,
    ):
        """**Arguments:**

        - `keys`: the random key of a panel, by its number.
        - `width`: the number of probes in a panel.
        - `room`: the number of panels that the arrays have room for.
        - `start`, `stop`: the new panels.
        - `stage`: the number of the stage. (It has the new panels, and no others.)
        - `probes`: the number of probes up to the end of each stage of a run.
        - `rest`: the number of samples that a fixed budget has left besides.
        """
        self.keys, self.width, self.room = keys, width, room
        self.start, self.stop, self.stage, self.probes = start, stop, stage, probes
        self.single = not probes
        self.capacity, self.rest = width * room, rest

    def empty(self, block: BlockOperator, kept: bool = True) -> Inexact[Array, "m n"]:
        """An array with room for all vectors; without entries if they are not `kept`."""
        return jnp.zeros((self.capacity, block.n if kept else 0), block.dtype)

    def empty_factor(self, block: BlockOperator) -> Inexact[Array, "m m"]:
        """A triangular factor with room for all vectors."""
        return jnp.zeros((self.capacity, self.capacity), block.dtype)

    def _loop(self, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        return lax.fori_loop(self.start, self.stop, step, carry)

    def _rows(self, array: Array, panel: Any) -> Array:
        return lax.dynamic_slice_in_dim(array, panel * self.width, self.width)

    def _put(self, array: Array, rows: Array, panel: Any) -> Array:
        return lax.dynamic_update_slice_in_dim(array, rows, panel * self.width, 0)

    def fold(self, add: Callable[..., Any], carry: Any) -> Any:
        """The carry after `add(carry, key, rows)` for every new panel.

        **Arguments:**

        - `add`: a function of the carry; of the key of a panel; and of a function that returns the
            rows of this panel in an array.
        - `carry`: what is to be changed.
        """
        if self.single:
            return add(carry, self.keys(0), lambda array: array)

        def step(j, carry):
            return add(carry, self.keys(j), lambda array: self._rows(array, j))

        return self._loop(step, carry)

    def each(self, one: Callable[[PRNGKeyArray], Array], array: Array) -> Array:
        """The array with the rows `one(key)` of every new panel."""
        if self.single:
            return one(self.keys(0))
        return self._loop(lambda j, array: self._put(array, one(self.keys(j)), j), array)

    def drawn_again(
        self, block: BlockOperator, panel: Callable[[PRNGKeyArray], AbstractWeights]
    ) -> AbstractWeights:
        """The sum of the weights `panel(key)` of all panels."""
        if self.single:
            return panel(self.keys(0))
        panels = jax.vmap(lambda j: panel(self.keys(j)))(jnp.arange(self.room))
        together = batch_width(block.operator, self.capacity) // self.width
        return PanelWeights(panels, self.width, max(1, together))

    def probes_of(
        self, sampler: AbstractSampler, block: BlockOperator, array: Inexact[Array, "m n"]
    ) -> Inexact[Array, "m n"]:
        """The array of probes, with the new ones."""
        return self.each(lambda key: sampler.probes(key, block.n, self.width, block.dtype).T, array)

    def at_first(self, new: Callable[[], Any], old: Any) -> Any:
        """`new()` in the first stage, `old` in all others."""
        return new() if self.single else lax.cond(self.start == 0, new, lambda: old)

    def multiply(
        self,
        block: BlockOperator,
        mm: Callable[[Inexact[Array, "n m"]], Inexact[Array, "n m"]],
        vectors: Inexact[Array, "m n"],
        products: Inexact[Array, "m n"],
    ) -> Inexact[Array, "m n"]:
        """The products, with those of the new vectors."""
        if self.single:
            return mm(vectors.T).T
        # A function would be compiled for every width.
        together = 1 if calls_functions(block.operator) else min(TOGETHER, self.room)

        def by(panels):
            def step(state):
                j, products = state
                at = j * self.width, panels * self.width
                new = mm(lax.dynamic_slice_in_dim(vectors, *at).T).T
                return j + panels, lax.dynamic_update_slice_in_dim(products, new, at[0], 0)

            return lambda state: state[0] + panels <= self.stop, step

        state = self.start, products
        for panels in dict.fromkeys((together, 1)):
            state = lax.while_loop(*by(panels), state)
        return state[1]

    def project(
        self, q: Inexact[Array, "m n"], panel: Any, y: Inexact[Array, "b n"]
    ) -> tuple[Inexact[Array, "b n"], Inexact[Array, "m b"]]:
        """`y - c^T q` and `c = conj(q) y^T`, for the rows of q up to this panel: the part of y that
        is orthogonal to them.
        """
        together = min(TOGETHER, self.room)
        width = together * self.width

        def step(i, state):
            rest, c = state
            rows = lax.dynamic_slice_in_dim(q, i * width, width)
            new = matmul(jnp.conj(rows), y.T)
            c = lax.dynamic_update_slice_in_dim(c, new, i * width, 0)
            return rest - matmul(new.T, rows), c

        c = jnp.zeros((self.capacity, y.shape[0]), y.dtype)
        return lax.fori_loop(0, (panel + together - 1) // together, step, (y, c))

    def orthonormalise(
        self,
        q: Inexact[Array, "m n"],
        r: Inexact[Array, "m m"],
        new: Callable[[Any], Inexact[Array, "b n"]],
    ) -> tuple[Inexact[Array, "m n"], Inexact[Array, "m m"]]:
        """Extend the factorisation Y = R^T Q of the vectors so far by the new ones.

        If a new vector nearly lies in the span of Q, what is left after projection is mostly
        rounding errors, and not orthogonal to Q. So the projection and the factorisation of the
        rest are made twice.

        **Arguments:**

        - `q`: the basis so far.
        - `r`: the triangular factor so far.
        - `new`: a function that takes some rows of an array of vectors, and returns those of Y.
            (It is given a function of arrays, `rows`, which returns the rows of one panel.)

        **Returns:**

        The basis and the factor.
        """
        if self.single:
            basis, factor = qr(new(lambda array: array).T)
            return basis.T, factor

        def step(j, state):
            q, r = state
            y = new(lambda array: self._rows(array, j))

            def again(_, state):
                y, c, factor = state
                rest, more = self.project(q, j, y)
                y, another = panel_qr(rest)
                return y, c + matmul(more, factor), matmul(another, factor)

            c = jnp.zeros((self.capacity, self.width), y.dtype)
            start = y, c, jnp.eye(self.width, dtype=y.dtype)
            y, c, factor = lax.fori_loop(0, 2, again, start)
            c = self._put(c, factor, j)
            r = lax.dynamic_update_slice_in_dim(r, c, j * self.width, 1)
            return self._put(q, y, j), r

        return self._loop(step, (q, r))

    def residuals(
        self, q: Inexact[Array, "m n"], vectors: Inexact[Array, "m n"]
    ) -> Inexact[Array, "m n"]:
        """The vectors, of which the new ones are made orthogonal to the basis so far."""
        if self.single:
            return vectors - matmul(matmul(vectors, adjoint(q)), q)

        def step(j, vectors):
            rest, _ = self.project(q, self.stop, self._rows(vectors, j))
            return self._put(vectors, rest, j)

        return self._loop(step, vectors)

    def again(
        self, block: BlockOperator, y: Inexact[Array, "m n"]
    ) -> tuple[Inexact[Array, "n m"], Inexact[Array, "m m"]]:
        """The QR factorisation of the transpose of these rows, all of which are new."""
        start = self.empty(block), self.empty_factor(block)
        q, r = self.orthonormalise(*start, lambda rows: rows(y))
        return q.T, r


class AbstractExtendable(eqx.Module):
    """An algorithm that can be extended by further probes: how they change the state, and the
    estimate from a state.

    The state is a NamedTuple of arrays. The axes with one entry for each probe are those that the
    annotations of the state call m, as in `Inexact[Array, "m n"]`. A final subclass declares the
    abstract variables, and implements the abstract methods.
    """

    #: The number of matvecs that a probe takes.
    matvecs_per_probe: AbstractVar[int]

    #: Whether a stage may have any number of panels, so that a program can decide the budget.
    takes_any_budget: ClassVar[bool] = True

    #: Whether the products of a fixed budget that are too few for another probe are spent, on
    #: further samples.
    takes_rest: ClassVar[bool] = False

    #: The constants of the error bars, as measured for the algorithm.
    calibration: AbstractVar[Calibration]

    def panel_width(self, limit: int) -> int:
        """The number of probes in a panel of a run with at most so many: the largest for which few
        are left over, if there is one.
        """
        if limit <= PANEL:
            return limit
        widths = range(PANEL, NARROW - 1, -1)
        few = [width for width in widths if SPARE * (limit % width) <= limit]
        return few[0] if few else min(widths, key=lambda width: limit % width)

    def prepare(self, operator: lx.AbstractLinearOperator) -> BlockOperator:
        """The operator in the form that `extend` multiplies."""
        return BlockOperator(operator).linearised()

    @abc.abstractmethod
    def start(self, growth: Growth, block: BlockOperator) -> Any:
        """The state without probes.

        **Arguments:**

        - `growth`: what the arrays must have room for.
        - `block`: the operator, as `prepare` made it.

        **Returns:**

        The state.
        """

    @abc.abstractmethod
    def extend(self, state: Any, growth: Growth, block: BlockOperator) -> Any:
        """Spend products on new probes.

        **Arguments:**

        - `state`: the state so far.
        - `growth`: the new probes.
        - `block`: the operator, as `prepare` made it.

        **Returns:**

        The new state.
        """

    @abc.abstractmethod
    def estimate(
        self, state: Any, columns: Columns, block: BlockOperator
    ) -> tuple[PyTree[Array], PyTree[Array], Array]:
        """The estimate from all probes so far, without further products.

        **Arguments:**

        - `state`: the state.
        - `columns`: the probes that are in use.
        - `block`: the operator, as `prepare` made it.

        **Returns:**

        The value, its standard error, which includes rounding, and the status.
        """

    def counts(self, state: Any, probes: Any) -> tuple[Any, Any]:
        """The products that so many probes took, and the degrees of freedom of their estimate."""
        return probes * self.matvecs_per_probe, probes - 1

    @abc.abstractmethod
    def weights(
        self, state: Any, columns: Columns, growth: Growth, block: BlockOperator
    ) -> AbstractWeights:
        """The weights of the estimate.

        **Arguments:**

        - `state`: the state.
        - `columns`: the probes that are in use.
        - `growth`: all panels.
        - `block`: the operator, as `prepare` made it.

        **Returns:**

        The weights.
        """

    @abc.abstractmethod
    def complete(self, state: Any, block: BlockOperator) -> "Completed":
        """The exact trace (or diagonal), from the state and further products.

        **Arguments:**

        - `state`: the state, all of whose rows are in use.
        - `block`: the operator, as `prepare` made it.

        **Returns:**

        A `Completed`.
        """


def resized(state: Any, rows: int) -> Any:
    """The state with so many rows (and columns, of triangular factors), cut, or padded with 0."""

    def resize(array, axes):
        for axis in axes:
            array = lax.slice_in_dim(array, 0, min(rows, array.shape[axis]), axis=axis)
            width = [(0, 0)] * array.ndim
            width[axis] = (0, rows - array.shape[axis])
            array = jnp.pad(array, width)
        return array

    return _each_array(resize, state)


def masked(state: Any, inside: Array) -> Any:
    """The state with 0 in the rows (and columns, of triangular factors) that are not in use."""

    def mask(array, axes):
        for axis in axes:
            shape = [-1 if i == axis else 1 for i in range(array.ndim)]
            array = jnp.where(inside.reshape(shape), array, jnp.zeros((), array.dtype))
        return array

    return _each_array(mask, state)


def kept(done: Array, old: Any, new: Any) -> Any:
    """The new state, without what lanes that are done have added up in the meantime. (Rows that
    such a lane has got are not in use: see `masked`.)
    """
    fields = zip(old, new, probe_axes(type(new)), strict=True)
    return type(new)(*[now if axes else keep(done, was, now) for was, now, axes in fields])


def _each_array(fn: Callable[[Array, tuple[int, ...]], Array], state: Any) -> Any:
    """The state with `fn(array, axes)` in place of its arrays, given their axes of probes."""
    fields = zip(state, probe_axes(type(state)), strict=True)
    return type(state)(
        *[jtu.tree_map(lambda x, axes=axes: fn(x, axes), field) for field, axes in fields]
    )


def probe_axes(state: type) -> list[tuple[int, ...]]:
    """For each field of a state, the axes that have one entry for each probe."""
    dims = [getattr(hint, "dim_str", "").split() for hint in get_type_hints(state).values()]
    return [tuple(i for i, name in enumerate(names) if name == "m") for names in dims]


def run_once(
    extendable: AbstractExtendable, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
) -> tuple[Estimate, AbstractWeights]:
    """The estimate from a single panel, for a fixed budget."""
    block = extendable.prepare(operator)
    m, rest = divmod(k, extendable.matvecs_per_probe)
    growth = Growth(lambda _: key, m, 1, rest=rest if extendable.takes_rest else 0)
    state = extendable.extend(extendable.start(growth, block), growth, block)
    columns, rest = all_columns(m), growth.rest
    value, std_err, status = extendable.estimate(state, columns, block)
    spent, dof = extendable.counts(state, m)
    estimate = make_estimate(value, std_err, spent + rest, dof + rest, status)
    weights = if_wanted(lambda: extendable.weights(state, columns, growth, block))
    return extendable.calibration.applied(estimate), weights


class Completed(NamedTuple):
    """The exact value, from a state and further products."""

    value: PyTree[Inexact[Array, "..."]]
    #: 0, except for products of half precision, whose rounding is far above that of the value.
    std_err: PyTree[Real[Array, "..."]]
    num_matvecs: int | Int[Array, ""]  # the further products


def complete_diagonal(
    block: BlockOperator,
    q: Inexact[Array, "n m"],
    products: Inexact[Array, "n m"],
    others: tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]] | None = None,
    rows: Rows = Rows(),
) -> Completed:
    """The diagonal of A, from products with given vectors and with their orthogonal complement.

    **Arguments:**

    - `block`: the operator.
    - `q`: orthonormal columns.
    - `products`: A q.
    - `others`: more vectors, which together with q are well-conditioned, and the products of A with
        them; or None.
    - `rows`: which rows to add up.

    **Returns:**

    A `Completed`: it takes n further products, less the number of given vectors.
    """
    if others is not None:
        pairs = zip((q, products), others, strict=True)
        q, products = (jnp.concatenate(pair, axis=1) for pair in pairs)
    basis, r, orthogonal = complete_qr(q)
    products, missing = divide_by_upper(products, r), block.mm(orthogonal)
    diagonal = jnp.sum(jnp.conj(basis) * products, axis=1)
    diagonal = diagonal + jnp.sum(jnp.conj(orthogonal) * missing, axis=1)

    value = rows.of_vector(diagonal)
    std_err = jnp.zeros_like(value.real)
    if block.is_inexact:
        size = jnp.hypot(rows.norms(products), rows.norms(missing))
        std_err = rounding_of(size, block.eps)
    return Completed(value, std_err, orthogonal.shape[1])


def complete_trace(block: BlockOperator, q: Array, products: Array, others=None) -> Completed:
    """The trace of A, from products with given vectors and with their orthogonal complement.

    **Arguments:**

    - `block`: the operator.
    - `q`: orthonormal columns.
    - `products`: A q.
    - `others`: more vectors, which together with q are well-conditioned, and the products of A with
        them; or None.

    **Returns:**

    A `Completed`: it takes n further products, less the number of given vectors.
    """
    done = complete_diagonal(block, q, products, others, Rows((block.n,)))
    return done._replace(value=done.value[0], std_err=done.std_err[0])
