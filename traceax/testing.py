"""Checks for estimators of other packages: the ones that this package runs on its own estimators.

`import traceax.testing` needs nothing but the package itself.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax import lax

from ._core.precision import matmul
from ._core.verdict import RESULTS
from ._estimators.estimator import AbstractTraceEstimator
from ._estimators.trace import diagonal as diagonal_of, trace
from ._operators.block_operator import unflatten
from ._operators.checks import as_operator
from ._operators.tags import CHECKS, is_tagged

#: z-tests reject beyond so many standard deviations, a correct estimator with probability 6e-7.
_Z = 5.0
_PSD = lx.positive_semidefinite_tag


def check_estimator(
    estimator: AbstractTraceEstimator,
    *,
    diagonal: bool = False,
    operators: Sequence[lx.AbstractLinearOperator] | None = None,
    k: int | None = None,
    keys: int = 400,
    coverage: float = 0.88,
    contraction: bool = True,
) -> None:
    """Check that an estimator has the properties that all estimators of this package have.

    With fixed keys: values and derivatives are unbiased; the derivative along A is the value;
    intervals hold the true value; for `k >= n` the value is exact; no more products are made than
    are stated, and than the budget; `jit`, `vmap`, `grad`, `jvp` and second derivatives agree with
    single calls; all dtypes, scales, ranks and NaN end as they should; tolerances are met.
    Operators that the estimator's `check` refuses are left out.

    **Arguments:**

    - `estimator`: the estimator.
    - `diagonal`: whether its diagonals are checked, rather than its traces.
    - `operators`: square real operators of the default floating dtype, for the checks of statistics
        and exactness. Their matrices are materialised. By default two semidefinite operators with
        40 rows, with a flat and with a decaying spectrum, and one that is not symmetric.
    - `k`: the budget, below the number of rows. By default the larger of 16 and twice `smallest`.
    - `keys`: the number of keys.
    - `coverage`: the least share of intervals that contain the true value.
    - `contraction`: whether the value is the contraction of its weights with A: not where another
        estimator's weights are its derivative.

    **Raises:** `AssertionError` with the name of the first property that the estimator lacks;
    `ValueError` if the estimator accepts none of the operators, or `k` is not below their sizes.
    """
    subject = _Subject(estimator, diagonal)
    given = list(_default_operators() if operators is None else operators)
    accepted = [operator for operator in given if subject.accepts(operator)]
    if not accepted:
        raise ValueError(
            f"{type(estimator).__name__} accepts none of the operators. Give some that it does: "
            "`check_estimator(estimator, operators=[...])`."
        )
    budget = max(16, 2 * estimator.smallest) if k is None else k
    if any(budget >= operator.in_size() for operator in accepted):
        raise ValueError(
            f"The budget must be below the number of rows, got k={budget}. Give larger operators."
        )
    for operator in map(as_operator, accepted):
        _check_statistics(subject, operator, budget, keys, coverage, contraction)
        _check_exact(subject, operator)
    if not subject.accepts(_by_products(_spread(2 * budget), _PSD)):
        return
    checks = _check_products, _check_transforms, _check_dtypes, _check_scale, _check_degenerate
    for check in checks:
        check(subject, budget)
    _check_tolerance(subject)


# ------------------------------------------------------------------------- what the checks share


class _Subject(NamedTuple):
    """The traces, or the diagonals, of an estimator."""

    estimator: AbstractTraceEstimator
    diagonal: bool

    def require(self, condition: Any, what: str, detail: str = "") -> None:
        """Raise an `AssertionError` unless the condition holds."""
        if not bool(condition):
            name = type(self.estimator).__name__
            raise AssertionError(f"{name}: {what}{': ' if detail else ''}{detail}.")

    def accepts(self, operator: lx.AbstractLinearOperator) -> bool:
        """Whether the estimator takes this operator."""
        try:
            self.estimator.check(as_operator(operator))
        except ValueError:
            return False
        return True

    def solve(self, key: Any, operator: Any, k: int | None = None, **options: Any) -> Any:
        """The solution."""
        function: Callable[..., Any] = diagonal_of if self.diagonal else trace
        return function(key, operator, k, self.estimator, **options)

    def truth(self, matrix: Any) -> np.ndarray:
        """The true value, as a vector."""
        entries = np.diagonal(np.asarray(matrix))
        return entries if self.diagonal else entries.sum()[None]


def _by_products(matrix: Any, tags: Any = ()) -> lx.FunctionLinearOperator:
    """An operator that only multiplies with this matrix: none of its entries can be read."""
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matmul(matrix, v), structure, tags)


def _matrix(eigenvalues: Any, dtype: Any = float) -> Any:
    """A Hermitian matrix with these eigenvalues and a random basis."""
    rng = np.random.default_rng(1)
    basis = rng.standard_normal(2 * np.shape(eigenvalues))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        basis = basis + 1j * rng.standard_normal(basis.shape)
    basis = np.linalg.qr(basis)[0]
    matrix = (basis * eigenvalues) @ basis.conj().T
    return jnp.asarray((matrix + matrix.conj().T) / 2, dtype)


def _spread(n: int, dtype: Any = float) -> Any:
    """A Hermitian matrix with eigenvalues from 1 to 2."""
    return _matrix(np.linspace(1, 2, n), dtype)


def _unsymmetric(n: int, seed: int) -> Any:
    matrix = np.random.default_rng(seed).standard_normal((n, n)) / math.sqrt(n) + np.eye(n)
    return jnp.asarray(matrix, float)


def _default_operators() -> list[lx.AbstractLinearOperator]:
    semidefinite = [_spread(40), _matrix(0.9 ** np.arange(40))]
    return [*(_by_products(x, _PSD) for x in semidefinite), _by_products(_unsymmetric(40, 0))]


def _flat(tree: Any) -> Any:
    """A scalar, or a PyTree of arrays, as a vector."""
    return jnp.concatenate([jnp.ravel(x) for x in jtu.tree_leaves(tree)])


def _rounding(matrix: Any) -> float:
    """A bound on the rounding error of a sum of entries."""
    eps = float(jnp.finfo(matrix.dtype).eps)
    return 2000 * eps * max(float(np.linalg.norm(np.asarray(matrix))), 1e-30)


# ------------------------------------------------------------------------------------ statistics


def _moved(operator: Any, direction: Any, steps: Any) -> Any:
    """(1 + s_0) A + s_1 D as an operator of the structure and with the tags of A."""
    structure = operator.in_structure()

    def product(vector):
        image = _flat(operator.mv(vector))
        return unflatten(structure, image + steps[0] * image + steps[1] * direction @ _flat(vector))

    known = _PSD, lx.negative_semidefinite_tag, lx.symmetric_tag
    tags = [tag for tag in known if is_tagged(CHECKS[tag], operator)]
    return lx.FunctionLinearOperator(product, structure, tags)


def _check_statistics(subject, operator, k, count, coverage, contraction) -> None:
    matrix = operator.as_matrix()
    n = matrix.shape[0]
    unrelated = _unsymmetric(n, 3)

    @jax.jit
    def run(keys):
        def one(key):
            def value(steps):
                solution = subject.solve(key, _moved(operator, unrelated, steps), k)
                return _flat(solution.value), solution

            slopes, solution = jax.jacfwd(value, has_aux=True)(jnp.zeros(2))
            lower, upper = (_flat(end) for end in solution.interval(0.95))
            counts = solution.num_matvecs, solution.result == RESULTS.successful
            return _flat(solution.value), slopes[:, 0], slopes[:, 1], lower, upper, *counts

        # Not `vmap`: on few cores, batched calls into LAPACK may wait for each other.
        return lax.map(one, keys)

    outcomes = run(jr.split(jr.key(0), count))
    values, in_a, in_unrelated, lower, upper, spent, successful = map(np.asarray, outcomes)
    truth = subject.truth(matrix)
    slack = _rounding(matrix)
    subject.require(successful.all(), "a result is not successful")
    # An estimator may always be exact.
    most = n if np.all(lower == upper) else max(k, subject.estimator.smallest)
    subject.require((spent <= most).all(), "more products than the budget", f"{spent.max()}")

    def unbiased(samples, truth, what):
        error = samples - truth
        deviation = error.std(axis=0, ddof=1) / math.sqrt(count)
        z = np.abs(error.mean(axis=0)) / (_Z * deviation + slack)
        subject.require((z <= 1).all(), what, f"{_Z * z.max():.1f} standard deviations off")

    unbiased(values, truth, "the value is biased")
    direction = subject.truth(unrelated)
    unbiased(in_unrelated, direction, "the derivative is biased, E<G, dA> is not that of dA")
    if contraction:
        difference = np.abs(in_a - values).max()
        what = "the value is not the contraction <G, A> of its weights"
        subject.require(difference <= slack, what, f"{difference:.2g} apart")
    share = ((lower - slack <= truth) & (truth <= upper + slack)).mean()
    what = "95 % intervals hold the true value too rarely"
    subject.require(share >= coverage, what, f"{share:.1%} of cases, not {coverage:.0%}")


def _check_exact(subject, operator) -> None:
    matrix = operator.as_matrix()
    n = matrix.shape[0]
    solution = subject.solve(jr.key(1), operator, n + 5)
    error = np.abs(np.asarray(_flat(solution.value)) - subject.truth(matrix)).max()
    subject.require(error <= _rounding(matrix), "not exact for k >= n", f"{error:.2g} off")
    zero = np.all(np.asarray(_flat(solution.std_err)) == 0)
    subject.require(zero, "the standard error is not 0 for k >= n")
    spent = int(solution.num_matvecs)
    subject.require(spent <= n, "more than n products", f"{spent} of {n}")


# -------------------------------------------------------------------------------------- products


def _check_products(subject, k: int) -> None:
    """Count the products that are made, on the host."""
    matrix = np.asarray(_spread(2 * max(k, subject.estimator.smallest) + 11))
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    counts = []

    def multiplied(vectors):
        counts.append(vectors.size // len(matrix))
        return np.asarray(vectors @ matrix, matrix.dtype)

    @jax.custom_jvp
    def product(vector):
        return jax.pure_callback(multiplied, structure, vector, vmap_method="expand_dims")

    product.defjvp(lambda primals, tangents: (product(*primals), product(*tangents)))
    operator = lx.FunctionLinearOperator(product, structure, _PSD)
    stated = int(subject.solve(jr.key(0), operator, k).num_matvecs)
    made = sum(counts)
    subject.require(made <= stated, "more products than it states", f"{made}, not {stated}")


# ------------------------------------------------------------------------------------ transforms


def _check_transforms(subject, _: int) -> None:
    """Check transforms of an estimate of A(a, b) = exp(a) B + b^2 C. With weights held fixed, all
    derivatives follow from the first ones.
    """
    n = max(12, subject.estimator.smallest + 5)
    k = max(7, subject.estimator.smallest)
    b_part = _spread(n)
    c_part = _matrix(np.linspace(0.5, 3, n))
    share = np.linspace(1, 2, len(subject.truth(b_part)))

    def f(point, key):
        matrix = jnp.exp(point[0]) * b_part + point[1] ** 2 * c_part
        value = _flat(subject.solve(key, _by_products(matrix, _PSD), k).value)
        return jnp.sum(value * share.astype(value.dtype))

    def slope(p, q):
        return jax.jvp(lambda p: f(p, q), (p,), (direction,))

    keys = jr.split(jr.key(2), 3)
    points = jnp.asarray([[0.3, 0.7], [-0.4, 1.1], [0.1, 0.4]])
    direction = jnp.asarray([0.6, -0.8])
    both = jax.value_and_grad(f)
    single = [jax.jit(both)(*pair) for pair in zip(points, keys, strict=True)]
    values, gradients = (jnp.stack(x) for x in zip(*single, strict=True))
    second = jax.vmap(jnp.diag)(jnp.stack([gradients[:, 0], gradients[:, 1] / points[:, 1]], 1))
    hessians = jax.jit(jax.vmap(jax.jacfwd(jax.jacrev(f))))
    found = {
        "an eager call": (f(points[0], keys[0]), values[0]),
        "jit of vmap of grad": (jax.jit(jax.vmap(both))(points, keys), (values, gradients)),
        "vmap of jvp": (jax.jit(jax.vmap(slope))(points, keys), (values, gradients @ direction)),
        "vmap of jacfwd of jacrev": (hessians(points, keys), second),
    }
    rtol = 1e3 * float(jnp.finfo(b_part.dtype).eps) ** 0.75
    for what, pair in found.items():
        for x, y in zip(*map(jtu.tree_leaves, pair), strict=True):
            same = x.shape == y.shape and np.allclose(x, y, rtol=rtol, atol=rtol)
            subject.require(same, f"{what} disagrees with single calls")


# --------------------------------------------------------------------------- dtypes, and the rest


def _check_near(subject, operator, matrix, k: int, what: str, rounding: float) -> Any:
    """The value and its standard error (inf for one sample). The value must be exact to ten
    standard errors, which few samples may underrate, and `rounding` for each entry; a diagonal in
    the norm, since one of many entries may be further off.
    """
    solution = jax.jit(lambda key: subject.solve(key, operator, k))(jr.key(3))
    value, std_err = (np.asarray(_flat(x)) for x in (solution.value, solution.std_err))
    finite = np.isfinite(value).all() and not np.isnan(std_err).any()
    subject.require(finite, f"{what}: the value is not finite, or the standard error is NaN")
    error = np.linalg.norm(value - subject.truth(matrix))
    is_near = error <= 10 * np.linalg.norm(std_err) + rounding * math.sqrt(value.size)
    subject.require(is_near, f"{what}: the value is off", f"by {error:.2g}")
    return value, std_err


def _check_dtypes(subject, k: int) -> None:
    dtypes = [jnp.float32, jnp.complex64, jnp.bfloat16]
    if jnp.result_type(float) == np.float64:
        dtypes += [jnp.float64, jnp.complex128]
    for dtype in dtypes:
        matrix = _spread(2 * k, dtype)
        operator = _by_products(matrix, _PSD)
        if not subject.accepts(operator):
            continue
        name = np.dtype(dtype).name
        exact = np.asarray(matrix.astype(np.float32 if dtype == jnp.bfloat16 else dtype))
        rounding = 80 * float(jnp.finfo(dtype).eps) * k
        value, std_err = _check_near(subject, operator, exact, k, name, rounding)
        right = value.dtype == np.real(exact).dtype  # a semidefinite matrix has a real diagonal
        subject.require(right, f"{name}: the dtype of the value is wrong", str(value.dtype))
        subject.require(np.isrealobj(std_err), f"{name}: the standard error is complex")


def _check_scale(subject, k: int) -> None:
    matrix = _spread(2 * k, np.float32)
    solve = jax.jit(lambda matrix: subject.solve(jr.key(5), _by_products(matrix, _PSD), k))

    def at_scale(scale):
        solution = solve(matrix * scale)
        parts = _flat(solution.value), _flat(solution.std_err)
        return [np.asarray(part, np.float64) / scale for part in parts]

    expected = at_scale(1.0)
    size = 1e-4 * np.abs(expected[0]).max()
    for exponent in (66, -66):
        rows = zip(("value", "standard error"), at_scale(2.0**exponent), expected, strict=True)
        for name, x, y in rows:
            same = np.allclose(x, y, rtol=1e-2 if name == "standard error" else 0, atol=size)
            what = f"an operator times 2^{exponent} has another {name}"
            subject.require(same, what, f"{x} times that for {y}")


def _check_degenerate(subject, k: int) -> None:
    n = 2 * k
    for rank in (2, 0):
        matrix = _matrix(np.where(np.arange(n) < rank, 1.0, 0.0))
        rounding = 10 * float(jnp.finfo(matrix.dtype).eps) ** 0.5
        operator = _by_products(matrix, _PSD)
        _check_near(subject, operator, matrix, k, f"an operator of rank {rank}", rounding)
    operator = _by_products(_spread(n).at[1, 2].set(jnp.nan), _PSD)
    solution = subject.solve(jr.key(4), operator, k)
    said = solution.result == RESULTS.nonfinite_operator
    subject.require(said, "NaN in the operator does not end as nonfinite_operator")
    nan = np.isnan(np.asarray(_flat(solution.value)))
    # Entries of a diagonal may stand whose rows are finite.
    nan = nan[1] if subject.diagonal else nan.all()
    subject.require(nan, "NaN in the operator, but not in the value")


# ------------------------------------------------------------------------------------- tolerance


def _check_tolerance(subject) -> None:
    n = max(150, 6 * subject.estimator.smallest)
    matrix = _matrix(np.linspace(0.5, 1.5, n))
    truth = subject.truth(matrix)
    rtol = 0.1

    def value(key, scale=1.0):
        solution = subject.solve(key, _by_products(scale * matrix, _PSD), rtol=rtol)
        return _flat(solution.value), solution.num_matvecs

    keys = jr.split(jr.key(5), 20)
    values, spent = (np.asarray(x) for x in jax.jit(partial(lax.map, value))(keys))
    error = np.linalg.norm(values - truth, axis=1) / np.linalg.norm(truth)
    share = (error <= rtol).mean()
    what = "a run to a tolerance misses it too often"
    subject.require(share >= 0.8, what, f"{1 - share:.0%} of {len(keys)} keys")
    lanes = jax.jit(jax.vmap(value))(keys[:3])
    same = np.allclose(lanes[0], values[:3], rtol=1e-3) and np.array_equal(lanes[1], spent[:3])
    subject.require(same, "a run to a tolerance is another one in a lane of vmap")
    slope = jax.jit(jax.jacfwd(lambda scale: value(keys[0], scale)[0]))(1.0)
    same = np.allclose(slope, values[0], rtol=1e-3)
    subject.require(same, "the derivative of a run to a tolerance is wrong")
