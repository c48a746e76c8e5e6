r"""A-Hutch++: how many columns to sketch, and how many probes to draw, from running norms.

With Q (m columns) from the sketch, P = Q Q^H and B = (I - P) A (I - P), the number of residual
probes needed is C ||B||_F^2, C = 4 log(2 / delta) / eps^2. For a Hermitian A

    ||B||_F^2 = ||A||_F^2 + ||Q^H A Q||_F^2 - 2 ||A Q||_F^2,

so that column q_j, with x = A q_j, lowers this norm by
d_j = 2 ||x||^2 - 2 ||Q_{<j}^H x||^2 - |q_j^H x|^2, and the number of products by C d_j - 2. The
sketch ends when the latter was negative for two columns in a row.

*Complex A.* A form g^H B g of complex normal g equals a form of real normal vectors, with a matrix
that has every eigenvalue of B halved, and twice. So the squared norm is half as large, and norms
have twice the degrees of freedom.

*Resphered samples* d u^H B u, with u = g / ||g|| and d = n - m, are the means of g^H B g given u.
By Jensen's inequality every bound from moment generating functions holds for them, too. As their
error does not depend on the trace of B, the bounds hold with B_0 = B - (tr B / d) I in place of B.
For any fixed beta, ||(B - beta I) g||^2 has mean ||B - beta I||_F^2 >= ||B_0||_F^2. The beta used
here is fitted to the probes: one number from k d.
"""

import math
from typing import Any, ClassVar, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.control_flow import any_lane
from .._core.estimate import (
    NOT_CONVERGED,
    SUCCESSFUL,
    Estimate,
    make_estimate,
    rounding_of,
    scale_of,
    status_of,
)
from .._core.progress import report
from .._estimators.calibration import CALIBRATION
from .._estimators.estimator import AbstractTraceEstimator
from .._linalg.factorisations import qr
from .._operators.block_operator import BlockOperator
from .._operators.tags import is_hermitian
from .._probes.random import numbered, split
from .._probes.samplers import NormalSampler
from .._sketch.leave_one_out import adjoint, column_dots, matmul, square_norms
from .._sketch.weights import AbstractWeights

#: The least width (unless the budget is too small for it) and the largest.
NARROW, WIDE = 5, 8


def _block_width(most: int) -> int:
    """The width of blocks for which the least of this budget is left over."""
    wide = min(WIDE, most // 3)
    return min(range(wide, min(NARROW, wide) - 1, -1), key=lambda width: most % width)


def _prefixes(columns: int, width: int) -> list[int]:
    """Doubling widths up to this number of columns."""
    widths = [width]
    while widths[-1] < columns:
        widths.append(min(2 * widths[-1], columns))
    return widths


def _on_prefix(fn: Any, q: Array, used: Array, width: int, x: Array) -> Array:
    """`fn(p, x)`, where p has all columns of q that are in use (under `vmap`: in any lane), and at
    most as many columns of zeros.
    """
    widths = _prefixes(q.shape[1], width)
    level = jnp.zeros((), jnp.int32)
    for w in widths[:-1]:
        level += any_lane(used > w)
    return lax.switch(level, [lambda x, w=w: fn(q[:, :w], x) for w in widths], x)


def _complement(q: Array, used: Array, width: int, x: Array) -> Array:
    """(I - Q Q^H) X, of one block."""
    return _on_prefix(lambda p, x: x - matmul(p, matmul(adjoint(p), x)), q, used, width, x)


def _residual_probes(key: Any, i: Array, q: Array, used: Array, width: int) -> Array:
    """The i-th block of g = (I - Q Q^H) psi, with normal psi."""
    psi = NormalSampler().probes(numbered(key, i), q.shape[0], width, np.dtype(q.dtype))
    return _complement(q, used, width, psi)


@final
class AdaptiveWeights(AbstractWeights):
    """`G = Q Q^H + sum_i c_i g_i g_i^H / k`. The probes are drawn again from their key."""

    q: Inexact[Array, "n m"]  # with zeros in the columns that were not used
    key_data: Array
    sketched: Int[Array, ""]  # blocks
    probed: Int[Array, ""]  # blocks
    key_impl: Any = eqx.field(static=True)
    width: int = eqx.field(static=True)
    most: int = eqx.field(static=True)  # blocks of probes

    def contract(self, operator):
        """See `AbstractWeights`."""
        block = BlockOperator(operator)
        n, width = self.q.shape[0], self.width
        used = self.sketched * width

        def captured(i):
            q = lax.dynamic_slice_in_dim(self.q, i * width, width, 1)
            return jnp.sum(block.quadratic_forms(block.leaves(q)))

        def residual(i):
            key = jr.wrap_key_data(self.key_data, impl=self.key_impl)  # no residual, for JAX 0.10.0
            g = _residual_probes(key, i, self.q, used, width)
            factor = (n - used) / (square_norms(g) * (self.probed * width))
            return jnp.sum(factor * block.quadratic_forms(block.leaves(g)))

        def total(forms, count, most):
            # Without the checkpoint, reverse mode would store each block's vectors.
            forms = jax.checkpoint(forms, prevent_cse=False)
            zero = jnp.zeros((), block.dtype)

            def step(value, i):
                used = any_lane(i < count)
                one = lax.cond(used, lambda: forms(i).astype(zero.dtype), lambda: zero)
                return value + jnp.where(i < count, one, zero), None

            return lax.scan(step, zero, jnp.arange(most))[0]

        columns = self.q.shape[1] // width
        return total(captured, self.sketched, columns) + total(residual, self.probed, self.most)


class _Sketch(NamedTuple):
    """The low-rank part. All numbers are those of A / scale."""

    turn: Int[Array, ""]  # the number of blocks in the lane with the most
    going: Bool[Array, ""]
    blocks: Int[Array, ""]
    q: Inexact[Array, "n m"]  # without the last block
    last: Inexact[Array, "n width"]
    trace: Inexact[Array, ""]  # of Q^H A Q
    square: Real[Array, ""]  # ||A Q||_F^2
    small: Bool[Array, ""]  # whether the last column saved fewer products than it cost
    scale: Real[Array, ""]
    status: Int[Array, ""]


class _Probes(NamedTuple):
    """The residual probes. All numbers are those of A / scale."""

    turn: Int[Array, ""]
    going: Bool[Array, ""]
    blocks: Int[Array, ""]
    samples: Inexact[Array, "blocks width"]
    sums: Real[Array, " 3"]  # of ||B g||^2, g^H B g and ||g||^2
    met: Bool[Array, ""]
    status: Int[Array, ""]


class _AdaptiveRun:
    """One run. (It is not a PyTree, as it exists only during a trace.)"""

    def __init__(self, delta, key, operator, most, rtol, atol, progress):
        self.block = BlockOperator(operator).linearised()
        self.n, self.most, self.progress = self.block.n, most, progress
        self.rtol, self.atol = rtol, atol
        self.real = jnp.finfo(self.block.dtype).dtype
        self.width = width = _block_width(most)
        self.sketch_blocks = (most - width) // (2 * width)
        self.probe_blocks = (most - 2 * width) // width
        self.sketch_key, self.probe_key = split(key)
        # The number of real normal numbers in one entry of a probe.
        self.field = 2 if jnp.issubdtype(self.block.dtype, jnp.complexfloating) else 1
        self.constant = 4 * math.log(2 / delta) / self.field  # C eps^2
        self.delta = delta

    def _eps(self, trace: Array, scale: Array) -> Array:
        """The tolerance for A / scale, given the running estimate of its trace."""
        return (self.atol / scale + self.rtol * jnp.abs(trace)).astype(self.real)

    def _rounding(self, square: Array) -> Array:
        """The standard error that rounding adds, from ||A Q||_F^2."""
        return rounding_of(jnp.sqrt(square), self.block.eps)

    def sketch(self) -> _Sketch:
        zero, no = jnp.zeros((), self.real), jnp.zeros((), jnp.int32)
        q = jnp.zeros((self.n, self.sketch_blocks * self.width), self.block.dtype)
        trace, false = jnp.zeros((), self.block.dtype), jnp.array(False)
        last = q[:, : self.width]
        start = _Sketch(no, ~false, no, q, last, trace, zero, false, zero + 1, no)
        end = lax.while_loop(lambda s: any_lane(s.going), self._sketch_block, start)
        return self._stored(end)

    def _stored(self, s: _Sketch) -> _Sketch:
        """Put the last block into q, before q is read, so that it is updated in place."""
        place = jnp.maximum(s.turn - 1, 0) * self.width
        return s._replace(q=lax.dynamic_update_slice_in_dim(s.q, s.last, place, 1))

    def _sketch_block(self, s: _Sketch) -> _Sketch:
        s = self._stored(s)
        width, used = self.width, s.turn * self.width
        key = numbered(self.sketch_key, s.turn)
        omega = NormalSampler().probes(key, self.n, width, np.dtype(self.block.dtype))
        products = self.block.mm(omega)
        scale = jnp.where(s.turn == 0, scale_of(products), s.scale)

        def orthonormal(_, factors):
            y, r = factors
            y, new_r = qr(_complement(s.q, used, width, y))
            return y, matmul(new_r, r)

        # Twice, because columns that are mostly rounding errors are not orthogonal to Q at first.
        identity = jnp.eye(width, dtype=products.dtype)
        new, r = lax.fori_loop(0, 2, orthonormal, (products / scale, identity))
        # |r_jj|^2 has mean ||(I - P) A||_F^2 with P from the columns before the j-th.
        left_over = jnp.abs(jnp.diagonal(r))
        x = self.block.mm(new) / scale

        inner = jnp.square(jnp.abs(matmul(adjoint(new), x)))
        inner = 2 * jnp.sum(jnp.triu(inner, 1), axis=0) + jnp.diagonal(inner)
        outer = _on_prefix(lambda p, x: square_norms(matmul(adjoint(p), x)), s.q, used, width, x)
        norms = square_norms(x)
        gain = jnp.maximum(2 * norms - 2 * outer - inner, 0)  # d_j
        square = s.square + jnp.sum(norms)

        # Unbiased given the blocks before: tr(P A) + omega^H (I - P) A omega.
        rest = column_dots(matmul(adjoint(new), omega), r)
        eps = self._eps(s.trace + jnp.mean(rest), scale)
        columns = used + 1 + jnp.arange(width)
        small = jnp.sqrt(self.constant / 2 * gain) < eps
        # If C ||B||_F^2 is more than the budget allows, m should minimise the variance
        # ||B||_F^2 / (most - 2 m) instead. This is the same condition with another C.
        small |= (self.most - 2 * columns) * gain < 2 * jnp.square(left_over)
        small &= columns > 1
        twice = small & jnp.concatenate([s.small[None], small[:-1]])
        captured = jnp.max(left_over[-2:]) <= self._rounding(square)
        status = status_of(products, x)
        full = s.turn + 1 == self.sketch_blocks
        going = ~(jnp.any(twice) | captured | full) & (status == SUCCESSFUL)

        def lane(new, old):
            return jnp.where(s.going, new, old)

        return _Sketch(
            s.turn + 1,
            s.going & going,
            lane(s.turn + 1, s.blocks),
            s.q,
            lane(new, jnp.zeros_like(new)),
            lane(s.trace + jnp.sum(column_dots(new, x)), s.trace),
            lane(square, s.square),
            lane(small[-1], s.small),
            lane(scale, s.scale),
            lane(status, s.status),
        )

    def _mean_and_std_err(self, p: _Probes) -> tuple[Array, Array]:
        count = jnp.maximum(p.blocks * self.width, 1)
        mean = jnp.sum(p.samples) / count
        used = (jnp.arange(self.probe_blocks) < p.blocks)[:, None]
        square = jnp.sum(jnp.where(used, jnp.square(jnp.abs(p.samples - mean)), 0))
        std_err = jnp.sqrt(square / (count * jnp.maximum(count - 1, 1)).astype(self.real))
        return mean, jnp.where(count > 1, std_err, jnp.inf)

    def probes(self, s: _Sketch) -> _Probes:
        from scipy.special import gammaincinv  # imported only here, because it takes time

        # Whatever the eigenvalues: with probability at most delta, the mean of k squared norms is
        # below alpha_k times its expectation.
        half = self.field * self.width / 2 * np.arange(1, self.probe_blocks + 1)
        roots = jnp.asarray(np.sqrt(gammaincinv(half, self.delta) / half), self.real)
        no, used = jnp.zeros((), jnp.int32), s.blocks * self.width
        samples = jnp.zeros((self.probe_blocks, self.width), self.block.dtype)
        sums = jnp.zeros(3, self.real)
        start = _Probes(no, s.status == SUCCESSFUL, no, samples, sums, jnp.array(False), s.status)

        def probe_block(p: _Probes) -> _Probes:
            g = _residual_probes(self.probe_key, p.turn, s.q, used, self.width)
            products = self.block.mm(g) / s.scale
            status = status_of(products)
            forms, norms = column_dots(g, products), square_norms(g)
            squares = square_norms(_complement(s.q, used, self.width, products))
            sums = p.sums + jnp.stack([jnp.sum(a) for a in (squares, forms.real, norms)])
            new = jnp.where(p.going, (self.n - used) / norms * forms, jnp.zeros_like(forms))
            samples = lax.dynamic_update_slice_in_dim(p.samples, new[None], p.turn, 0)
            p = p._replace(
                turn=p.turn + 1,
                blocks=jnp.where(p.going, p.turn + 1, p.blocks),
                samples=samples,
                sums=jnp.where(p.going, sums, p.sums),
                status=jnp.where(p.going, status, p.status),
            )
            mean, std_err = self._mean_and_std_err(p)
            norm = jnp.sqrt(jnp.maximum(p.sums[0] - p.sums[1] ** 2 / p.sums[2], 0))
            # k >= C (F / k) / alpha_k
            eps = self._eps(s.trace + mean, s.scale)
            enough = eps * (p.blocks * self.width) * roots[p.turn - 1]
            met = math.sqrt(self.constant) * norm <= enough
            # More probes do not reduce rounding errors.
            done = met | (std_err <= self._rounding(s.square))
            spent = self._spent(s, p)
            going = p.going & ~done & (status == SUCCESSFUL) & (spent + self.width <= self.most)
            if self.progress:
                value, error = s.scale * (s.trace + mean), s.scale * std_err
                report(self.sketch_key, self.most, spent, value, error, ~going)
            return p._replace(going=going, met=jnp.where(p.going, met, p.met))

        return lax.while_loop(lambda p: any_lane(p.going), probe_block, start)

    def _spent(self, s: _Sketch, p: _Probes) -> Array:
        return self.width * (2 * s.blocks + p.blocks)

    def outcome(self, tolerance: bool) -> tuple[Estimate, AdaptiveWeights]:
        s = self.sketch()
        p = self.probes(s)
        mean, std_err = self._mean_and_std_err(p)
        rounding = self._rounding(s.square)
        std_err = jnp.hypot(std_err, rounding)
        value = s.scale * (s.trace + mean)
        # The guarantee holds for exact products: rounding must be small beside the tolerance.
        met = p.met & (2 * rounding <= self._eps(s.trace + mean, s.scale))
        short = (p.status == SUCCESSFUL) & ~met
        status = jnp.where(short, NOT_CONVERGED, p.status) if tolerance else p.status
        dof = jnp.maximum(p.blocks * self.width - 1, 0)
        estimate = make_estimate(value, s.scale * std_err, self._spent(s, p), dof, status)
        key = self.probe_key
        counts = s.blocks, p.blocks, jr.key_impl(key), self.width, self.probe_blocks
        # A few remaining eigenvalues may dominate the samples, as with Hutch++.
        estimate = CALIBRATION["hutch++"].applied(estimate)
        return estimate, AdaptiveWeights(s.q, jr.key_data(key), *counts)


@final
class AdaptiveHutchPlusPlusEstimator(AbstractTraceEstimator):
    r"""A-Hutch++: Hutch++ with a guarantee for its error, and with the split between sketch and
    probes that takes the fewest products.

    With $Q$ an orthonormal basis of the range of $A \Omega$ (m probes) and l normal probes
    $\psi_i$, $g_i = (I - Q Q^*) \psi_i$,

    $$\mathrm{tr}(Q^* A Q) + \frac{1}{l} \sum_i \frac{n - m}{\|g_i\|^2} \, g_i^* A g_i,$$

    for operators that are tagged symmetric (real) or semidefinite. In `traceax.trace(key, operator,
    estimator=AdaptiveHutchPlusPlusEstimator(), atol=..., rtol=..., max_k=...)`, m grows until
    another column would save fewer residual probes than it costs products, and l until

    $$l \ge 4 \log(2 / \delta) \, \varepsilon^{-2} \alpha_l^{-1} F_l, \qquad
    \varepsilon = \mathtt{atol} + \mathtt{rtol} \, |\mathrm{value}|,$$

    where $F_l$ is the mean of $\|(B - \beta I) g_i\|^2$, $B = (I - Q Q^*) A (I - Q Q^*)$, with the
    fitted mean eigenvalue $\beta$ of $B$, and $\alpha_l$ the $\delta$-quantile of
    $\chi^2_l / l$.

    *The guarantee.* The error is at most $\varepsilon$ with probability $1 - 2 \delta$:
    $F_l / \alpha_l$ is less than $\|B - \beta I\|_F^2$ with probability at most $\delta$, and with
    $4 \log(2 / \delta) \varepsilon^{-2} (\|B\|_F^2 + \varepsilon \|B\|_2)$ probes the error exceeds
    $\varepsilon$ with probability at most $\delta$. As in the paper, three things are neglected:
    the bounds hold for a given l, but the algorithm searches for one; the term
    $\varepsilon \|B\|_2$ is left out; and with `rtol`, $\varepsilon$ is computed from the estimate
    in place of the trace. In return, both bounds are for the worst operator, and hence
    conservative: errors are about $\varepsilon / 4$ as published, and $\varepsilon / 5$ to
    $\varepsilon / 3$ as measured here.

    The published algorithm is changed in three respects. Columns come in blocks of 5 to 8. Samples
    are renormalised ("resphered"), which keeps the bounds, and replaces $\|B\|_F$ by the norm of B
    less its mean eigenvalue. If the budget is too small, the split is the one with the least
    variance. The same split is used with a budget `k` in place of a tolerance, and the estimate is
    then unbiased. An operator of low rank ends the run at once, with standard error 0.

    Cost: `2 m + l` matvecs, at least three blocks of columns and at most the budget; one block of
    `n x max_k/2` numbers; work in proportion to the products made. The derivative draws the probes
    again, and takes as many products. There is no `state` to go on from, and no completion to the
    exact trace: with `max_k >= n` a run may end as `RESULTS.not_converged` after n products.

    ??? cite "References"

        D. Persson, A. Cortinovis, D. Kressner, *Improved variants of the Hutch++ algorithm for
        trace estimation*, 2022, arXiv:2109.10659, doi:10.1137/21M1447623.
    """

    delta: float = eqx.field(default=0.05, static=True)
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 3

    def __check_init__(self):
        if not (isinstance(self.delta, float) and 0 < self.delta < 1):
            raise ValueError(f"delta must be a Python float between 0 and 1, got {self.delta!r}.")

    def check(self, operator):
        """The operator must be tagged symmetric (real) or semidefinite."""
        if not is_hermitian(operator):
            raise ValueError(
                "AdaptiveHutchPlusPlusEstimator needs a Hermitian operator, and this "
                f"{type(operator).__name__} is not tagged so. If it is, say so with "
                "`lineax.TaggedLinearOperator(operator, lineax.symmetric_tag)` (real operators, or "
                "`positive_semidefinite_tag`); otherwise use HutchPlusPlusEstimator()."
            )

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        return _AdaptiveRun(self.delta, key, operator, k, 0.0, 0.0, False).outcome(tolerance=False)

    def to_tolerance(self, key, operator, run):
        """See `AbstractTraceEstimator`."""
        if run.has_state:
            raise ValueError(
                "AdaptiveHutchPlusPlusEstimator has no state to go on from, got a `state` or "
                "keep_state=True. Leave both out, or use HutchPlusPlusEstimator()."
            )
        if run.budget is not None:
            raise ValueError(
                "AdaptiveHutchPlusPlusEstimator takes static budgets only: give k without max_k, "
                "or use HutchPlusPlusEstimator()."
            )
        given = run.max_k, run.rtol, run.atol, run.progress
        return _AdaptiveRun(self.delta, key, operator, *given).outcome(tolerance=True)


AdaptiveHutchPlusPlusEstimator.__init__.__doc__ = """**Arguments:**

- `delta`: the probability, a Python float, with which either bound may fail. By default 0.05.
- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers, or 64 vectors for operators that call functions. (A dense matrix is multiplied
    at once.)
"""
