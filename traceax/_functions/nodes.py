"""Functions at nodes, the Ritz values of Krylov spaces, and their divided differences."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Real

from .._core.estimate import rounding_unit
from .._operators.tags import semidefinite_sign

Function = Callable[[Array], Array]


def on_nodes(fn: Function, nodes: Array) -> Array:
    """The values of `fn` at an array of nodes, with the axes of a single value last."""
    flat = jax.vmap(fn)(nodes.reshape(-1))
    return flat.reshape(*nodes.shape, *flat.shape[1:])


def within_tag(operator: lx.AbstractLinearOperator, nodes: Array, eps: float) -> Array:
    """The Ritz values `nodes`. If the operator is tagged semidefinite, those that are on the wrong
    side of 0 by no more than rounding errors are set to 0.
    """
    sign = semidefinite_sign(operator)
    if sign == 0:
        return nodes
    rounding = rounding_of_nodes(operator, nodes, eps)
    return jnp.where((sign * nodes < 0) & (jnp.abs(nodes) <= rounding), 0, nodes)


def rounding_of_nodes(
    operator: lx.AbstractLinearOperator, nodes: Array, eps: float
) -> Real[Array, ""]:
    """How far rounding errors may move eigenvalues or Ritz values."""
    unit = rounding_unit(eps, nodes.dtype)
    return unit * math.sqrt(operator.in_size()) * jnp.max(jnp.abs(nodes))


def changes_by_rounding(
    fn: Function, operator: lx.AbstractLinearOperator, nodes: Array, values: Array, eps: float
) -> Array:
    """How far f changes if a node moves by the rounding errors of the products, which are those of
    the largest eigenvalue: far, for 1 / x and a small x; and the rounding of f itself and of sums
    of its values. (1 / x, log, roots and exp of kernels and other matrices with 60 to 800 rows, in
    single precision, by all eigenvectors: traces were off by up to 0.6 times the sum of these
    changes, and mostly by less than a tenth of it, as the errors of eigenvalues are independent;
    entries of diagonals, if f is steep, by up to 0.8 times theirs.)

    **Arguments:**

    - `fn`: the function f.
    - `operator`: the operator, for its tags.
    - `nodes`, `values`: eigenvalues or Ritz values, and f at them.
    - `eps`: the relative precision of a product.

    **Returns:**

    Numbers that are not negative, of the shape of `values`; inf where f is not finite at a node
    that rounding may have moved.
    """
    off = 2 * eps * jnp.max(jnp.abs(nodes))
    moved = [on_nodes(fn, within_tag(operator, nodes + x, eps)) for x in (off, -off)]
    changes = [jnp.abs(x.reshape(values.shape) - values) for x in moved]
    change = jnp.maximum(*(jnp.where(jnp.isfinite(x), x, jnp.inf) for x in changes))
    return change + 2 * float(jnp.finfo(values.dtype).eps) * jnp.abs(values)


def unresolved(
    fn: Function, nodes: Array, values: Array, residuals: Real[Array, "..."], count: int = 1
) -> Array:
    """How far f may be from its value at the Ritz values next to 0 that smaller eigenvalues may
    hide behind: with a residual of more than half of them. Where f is singular at 0 and the
    spectrum comes close to it, the values after q, q - d and q - 2d steps agree, as none of them
    has met the small eigenvalues.

    **Arguments:**

    - `fn`: the function f.
    - `nodes`, `values`, `residuals`: the Ritz values, f at them, and the norms of their residuals.
    - `count`: the number of Ritz values that are next to 0: one for each vector of a block.

    **Returns:**

    Numbers of the shape of `values`, at most |f|, and small where f is nearly a line towards 0.
    """
    size = jnp.abs(values)
    half = on_nodes(fn, nodes / 2)
    quarter = on_nodes(fn, nodes / 4)
    # How far f(x / 4) is from the line through f(x) and f(x / 2), as quadrature is exact for lines;
    # but little where f grows by little. It is f / 4 for roots and f for 1 / sqrt(x), and too
    # little to count for exp and for log.
    bend = 4 * jnp.abs(quarter - half - (half - values) / 2)
    growth = jnp.abs(quarter) / jnp.where(size > 0, size, 1) - 1
    change = jnp.minimum(bend, size * jnp.square(growth))
    change = jnp.where(change < size, change, size)  # NaN is not smaller
    change = jnp.where(change > size / 20, change, 0)
    last = jnp.sort(jnp.abs(nodes), axis=-1)[..., count - 1 : count]
    hidden = (residuals > jnp.abs(nodes) / 2) & (jnp.abs(nodes) <= last)
    return jnp.where(hidden.reshape(*nodes.shape, *[1] * (values.ndim - nodes.ndim)), change, 0)


def divided_differences(fn: Function, nodes: Real[Array, "p q"]) -> Real[Array, "p q q ..."]:
    """D_ij = (f(theta_i) - f(theta_j)) / (theta_i - theta_j), see `differences_between`."""
    return differences_between(fn, nodes, nodes)


def differences_between(
    fn: Function, first: Real[Array, "p a"], second: Real[Array, "p b"]
) -> Real[Array, "p a b ..."]:
    """D_ij = (f(theta_i) - f(eta_j)) / (theta_i - eta_j).

    Where this difference would cancel, D_ij is the mean of f' between the two nodes, by Gauss
    quadrature with two points. The error of that mean is estimated from its distance to f' at the
    middle, relative to f' and squared, because it is of higher order. So no length scale of f need
    be known.

    **Arguments:**

    - `fn`: the function.
    - `first`, `second`: the nodes theta and eta, for each probe.

    **Returns:**

    The differences, with the axes of a single value of `fn` last.
    """
    of_first = on_nodes(fn, first)
    of_second = of_first if second is first else on_nodes(fn, second)
    pairs = (first[:, :, None], second[:, None, :]), (of_first[:, :, None], of_second[:, None, :])
    return _quotient(fn, *pairs)


def slope_of(fn: Function) -> Function:
    """The derivative of a function of one number."""
    return lambda x: jax.jvp(fn, (x,), (jnp.ones((), x.dtype),))[1]


def _quotient(fn: Function, nodes: tuple[Array, Array], values: tuple[Array, Array]) -> Array:
    """Of all pairs of nodes, whose shapes are broadcast. See `differences_between`."""
    (left, right), (of_left, of_right) = nodes, values
    eps = float(jnp.finfo(left.dtype).eps)

    def slope(x):
        return on_nodes(slope_of(fn), x)

    middle, half = left + (right - left) / 2, (left - right) / (2 * math.sqrt(3))
    centre = slope(middle)
    mean = (slope(middle - half) + slope(middle + half)) / 2

    gap = left - right
    gap = gap.reshape(*gap.shape, *[1] * (of_left.ndim - gap.ndim))
    divisor = jnp.where(gap == 0, 1, gap)
    rounding = eps * (jnp.abs(of_left) + jnp.abs(of_right)) / jnp.abs(divisor)
    # Two roots, because the product would over- or underflow for operators of extreme scale.
    close = jnp.abs(mean - centre) <= jnp.sqrt(rounding) * jnp.sqrt(jnp.abs(centre))
    return jnp.where((gap == 0) | close, mean, (of_left - of_right) / divisor)
