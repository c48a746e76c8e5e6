"""Functions at nodes, the Ritz values of Krylov spaces, and their divided differences."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Real

from .._core.estimate import relative, rounding_unit
from .._operators.tags import semidefinite_sign

Function = Callable[[Array], Array]


def on_nodes(fn: Function, nodes: Array, counts: Bool[Array, "..."] | None = None) -> Array:
    """The values of `fn` at `nodes`, their own axes last; 0 where a node does not count, even if
    NaN.
    """
    flat = jax.vmap(fn)(nodes.reshape(-1))
    if counts is not None:
        flat = jnp.where(counts.reshape(-1, *[1] * (flat.ndim - 1)), flat, 0)
    return flat.reshape(*nodes.shape, *flat.shape[1:])


def within_tag(operator: lx.AbstractLinearOperator, nodes: Array, eps: float) -> Array:
    """The Ritz values `nodes`; 0 where the tag excludes their sign and rounding explains it."""
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


#: The errors of a Ritz value by rounding, in eps of the largest.
OF_RITZ_VALUES = (2.0, -2.0)

#: And those of an eigendecomposition: among 640 singular matrices with 30 to 600 rows the smallest
#: eigenvalue was at most 4 eps off, most of them by less than 2.
OF_EIGENVALUES = (*OF_RITZ_VALUES, 6.0, -6.0)


def changes_by_rounding(
    fn: Function,
    operator: lx.AbstractLinearOperator,
    nodes: Array,
    values: Array,
    eps: float,
    counts: Bool[Array, "..."] | None = None,
    moves: tuple[float, ...] = OF_RITZ_VALUES,
) -> Array:
    """How far f changes if a node moves by its error by rounding, the first two `moves` (far, for
    1 / x and a small x), and the rounding of f and of sums of its values. inf where f is not finite
    at a node that one of the `moves` may have reached.
    """
    unit = eps * jnp.max(jnp.abs(nodes))
    moved = [on_nodes(fn, within_tag(operator, nodes + x * unit, eps), counts) for x in moves]
    change = jnp.maximum(*(jnp.abs(x - values) for x in moved[:2]))
    finite = jnp.all(jnp.isfinite(jnp.stack(moved)), axis=0)
    change = jnp.where(finite & jnp.isfinite(change), change, jnp.inf)
    return change + 2 * float(jnp.finfo(values.dtype).eps) * jnp.abs(values)


#: Where the residual of the smallest Ritz value is so many times as large, nothing separates the
#: eigenvalues that it stands for from 0. Of matrices with a condition below 1e4 residuals are
#: smaller from some 40 products on, of Gram matrices of rank n - 1 they are larger.
UNRESOLVED = 1.9


def unresolved(
    fn: Function, nodes: Array, values: Array, residuals: Array, counts: Array, count: int = 1
) -> Array:
    """How far f may be from its values at the `count` Ritz values next to 0 (one for each vector of
    a block) if smaller eigenvalues hide behind. The values after q, q - d and q - 2d steps agree
    before any has met small eigenvalues.

    A Ritz value theta with the residual r is taken for the mean of two eigenvalues a and b with the
    deviation r. The spectrum goes on below theta as it does above, down to a = theta^2 / eta, with
    the next Ritz value eta, or thrice as far where clusters show (eta > 100 theta, or r > 5 theta);
    a has the mass r^2 / (r^2 + (theta - a)^2), and b = theta + r^2 / (theta - a), at most the
    largest node. The result is this mass times the distance of f(a) from a line, as quadrature is
    exact for lines: through f(theta) and, where r > 3 theta and f decays, f(b), else f(theta / 2);
    but |f| next to 0 where f is singular there (not of log) and r > `UNRESOLVED` theta.
    """
    x = jnp.abs(nodes)
    order = jnp.sort(jnp.where(counts, x, jnp.inf), axis=-1)
    eta = order[..., min(count, x.shape[-1] - 1), None]
    low = jnp.where(jnp.isfinite(eta), jnp.minimum(relative(x, eta), 1), 1)  # a / theta
    ratios = jnp.where(x <= order[..., count - 1, None], relative(residuals, x), 0)
    low = jnp.where((low < 0.01) | (ratios > 5), low**3, low)
    top = relative(jnp.max(x, axis=-1, keepdims=True), x)
    high = jnp.minimum(1 + relative(jnp.square(ratios), 1 - low), top)  # b / theta
    of_low, of_high, half = (on_nodes(fn, share * nodes) for share in (low, high, 0.5))
    mass = 1 / (1 + jnp.square(relative(1 - low, ratios)))
    shape = *nodes.shape, *[1] * (values.ndim - nodes.ndim)
    low, high, mass, ratios = (y.reshape(shape) for y in (low, high, mass, ratios))
    size = jnp.abs(values)
    decays = (ratios > 3) & (high > 1) & (jnp.abs(of_high) <= size)
    slope = jnp.where(decays, of_high - values, 2 * (values - half))
    slope = slope / jnp.where(decays, high - 1, 1)
    bend = jnp.abs(of_low - values + (1 - low) * slope)
    change = mass * jnp.where(jnp.isfinite(bend), bend, size)
    change = jnp.where(change > size / 20, change, 0)
    next_to_0 = jnp.abs(on_nodes(fn, float(jnp.finfo(nodes.dtype).eps) * nodes))
    far = (ratios > UNRESOLVED) & (next_to_0 > 100 * (size + jnp.abs(half)))
    return jnp.where(far, jnp.fmax(change, next_to_0), change)


def divided_differences(fn: Function, nodes: Real[Array, "p q"]) -> Real[Array, "p q q ..."]:
    """D_ij = (f(theta_i) - f(theta_j)) / (theta_i - theta_j) of the nodes of each probe, with the
    axes of a single value of `fn` last.

    Where this difference would cancel, D_ij is the mean of f' between the two nodes, by Gauss
    quadrature with two points. The error of that mean is estimated as the square of its distance to
    f' at the middle, relative to f': no length scale of f need be known.
    """
    values = on_nodes(fn, nodes)
    of_left = values[:, :, None]
    of_right = values[:, None, :]
    left = nodes[:, :, None]
    gap = left - nodes[:, None, :]
    middle = left - gap / 2
    half = gap / (2 * math.sqrt(3))
    points = jnp.stack([middle, middle + half, middle - half])
    centre, upper, lower = on_nodes(slope_of(fn), points)
    mean = (upper + lower) / 2

    gap = gap.reshape(*gap.shape, *[1] * (of_left.ndim - gap.ndim))
    divisor = jnp.where(gap == 0, 1, gap)
    eps = float(jnp.finfo(gap.dtype).eps)
    rounding = eps * (jnp.abs(of_left) + jnp.abs(of_right)) / jnp.abs(divisor)
    # Two roots, because the product would over- or underflow for operators of extreme scale.
    close = jnp.abs(mean - centre) <= jnp.sqrt(rounding) * jnp.sqrt(jnp.abs(centre))
    return jnp.where((gap == 0) | close, mean, (of_left - of_right) / divisor)


def slope_of(fn: Function) -> Function:
    """The derivative of a function of one number."""
    return lambda x: jax.jvp(fn, (x,), (jnp.ones((), x.dtype),))[1]
