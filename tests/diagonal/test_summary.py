"""Many answers from one pass: identities, bias, error bars, recovery, eigenvalues, derivatives."""

import functools

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tr
from traceax._diagonal.summary import SummaryEstimator
from traceax._operators.block_operator import BlockOperator

from ..helpers import (
    PSD,
    keys,
    random_unitary,
    variant,
    with_spectrum,
)
from ..reference import each

SYM = lx.symmetric_tag
N, M = 30, 6


def general(dtype, n=N):
    """Neither Hermitian nor of low rank."""
    rng = np.random.default_rng(3)
    matrix = rng.standard_normal((n, n)) * 0.9 ** np.arange(n)
    if np.issubdtype(dtype, np.complexfloating):
        matrix = matrix + 1j * rng.standard_normal((n, n))
    return matrix.astype(dtype)


# Matrix, tags, products a probe, and a direction in which to differentiate, of the same kind.
REAL, COMPLEX = general(np.float64), general(np.complex128)
CASES = {
    "symmetric": (REAL + REAL.T, SYM, 2),
    "general": (REAL, (), 3),
    "complex": (COMPLEX, (), 3),
    "complex-semidefinite": (COMPLEX @ COMPLEX.conj().T / 10, PSD, 2),
}


def direction(name):
    matrix, tags, _ = CASES[name]
    rng = np.random.default_rng(9)
    if tags == ():
        return rng.standard_normal((N, N)).astype(matrix.dtype)
    return with_spectrum(rng, np.linspace(-1, 2, N), matrix.dtype)


@functools.partial(jax.jit, static_argnums=2)
def summarise(key, matrix, tags):
    """The summary of an N x N matrix from M probes: compiled once for every tag and dtype."""
    return tr.summary(key, lx.MatrixLinearOperator(matrix, tags), budget(tags))


def budget(tags):
    return M * (2 if tags else 3) + 1  # one too many, for good measure


def linear_parts(key, matrix, k, tags):
    """Trace, diagonal and the square of the norm: what is unbiased."""
    solution = tr.summary(key, lx.MatrixLinearOperator(matrix, tags), k)
    square = jnp.square(solution.frobenius_norm.value)
    return (solution.trace.value, solution.diagonal.value, square), solution


# --- identities ----------------------------------------------------------------------------------


def naive_pieces(matrix, omega, i, held_out=()):
    """C = I - P for what the probes outside {i} and `held_out` span, and c g for probe i."""
    n = len(omega)
    rest = np.delete(omega, [i, *held_out], axis=1)
    q = np.linalg.qr(matrix @ rest)[0]
    c = np.eye(n) - q @ q.conj().T
    g = c @ omega[:, i]
    return c, g * np.sqrt((n - rest.shape[1]) / np.vdot(g, g).real)


def naive_square(matrix, omega, i, held_out=()):
    c, g = naive_pieces(matrix, omega, i, held_out)
    hidden = c @ matrix @ c
    return np.linalg.norm(matrix - hidden) ** 2 + np.linalg.norm(hidden @ g) ** 2


def naive_error(matrix, omega):
    m = omega.shape[1]
    samples = np.array([naive_square(matrix, omega, i) for i in range(m)])
    d = {
        (i, j): samples[i] - naive_square(matrix, omega, i, (j,))
        for i in range(m)
        for j in range(m)
        if i != j
    }
    covariance = np.mean([d[i, j] * d[j, i] for i, j in d])
    return samples.mean(), np.sqrt(samples.var(ddof=1) / m + max(0, covariance))


@pytest.mark.parametrize(
    "name", [name if name in ("general", "complex") else variant(name) for name in CASES]
)
def test_equals_the_naive_formulas_on_the_same_probes(name):
    matrix, tags, cost = CASES[name]
    key = jax.random.key(5)
    solution = summarise(key, jnp.asarray(matrix), tags)
    omega = np.asarray(tr.SphereSampler()(key, N, M, matrix.dtype))

    square, error = naive_error(matrix, omega)
    norm = solution.frobenius_norm
    np.testing.assert_allclose(norm.value**2, square, rtol=1e-12)
    np.testing.assert_allclose(norm.std_err, error / (2 * np.sqrt(square)), rtol=1e-9)

    if name == "complex":  # the others compile for seconds and say the same
        operator = lx.MatrixLinearOperator(jnp.asarray(matrix), tags)
        trace = tr.trace(key, operator, 2 * M, tr.XTraceEstimator())
        diagonal = tr.diagonal(key, operator, 2 * M, tr.XDiagEstimator(tr.SphereSampler()))
        for ours, theirs in ((solution.trace, trace), (solution.diagonal, diagonal)):
            np.testing.assert_allclose(ours.value, theirs.value, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(ours.std_err, theirs.std_err, rtol=1e-9)
            assert ours.value.dtype == theirs.value.dtype
    for part in (solution, solution.trace, solution.diagonal, solution.frobenius_norm):
        assert int(part.num_matvecs) == cost * M == budget(tags) - 1
        assert part.result == tr.RESULTS.successful
    assert int(solution.trace.stats["dof"]) == M - 1
    assert not jnp.iscomplexobj(norm.value)
    assert (solution.extreme_eigenvalues is None) == (tags == ())
    assert (solution.eigenvalue_residuals is None) == (tags == ())


@pytest.mark.parametrize("name", CASES)
def test_products_are_counted_honestly(name, monkeypatch):
    matrix, tags, cost = CASES[name]
    multiply, columns = BlockOperator.mm, []

    def counting(self, block):
        columns.append(block.shape[1])
        return multiply(self, block)

    monkeypatch.setattr(BlockOperator, "mm", counting)
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), tags)
    estimator, key = SummaryEstimator(), jax.random.key(0)
    with jax.numpy_dtype_promotion("standard"):  # as inside the primitive
        weights = jax.eval_shape(lambda: estimator.compute(key, operator, cost * M + 1)[1])
        assert sum(columns) == cost * M
        columns.clear()
        jax.eval_shape(lambda weights: weights.contract(operator), weights)
    assert sum(columns) == cost * M


# --- bias, error bars, first derivatives ---------------------------------------------------------


@functools.cache
def sample(name):
    """Values, solutions and forward derivatives for 500 keys."""
    matrix, tags, cost = CASES[name]

    def one(key, matrix, tangent):
        def along(t):
            return linear_parts(key, matrix + t.astype(matrix.dtype) * tangent, M * cost, tags)

        return jax.jvp(along, (jnp.zeros(()),), (jnp.ones(()),), has_aux=True)

    return jax.tree.map(
        np.asarray, each(one, keys(500), jnp.asarray(matrix), jnp.asarray(direction(name)))
    )


def z_scores(estimates, truth):
    errors = np.asarray(estimates) - truth
    return np.abs(errors.mean(0)) / (errors.std(0, ddof=1) / np.sqrt(len(errors)))


@pytest.mark.variant
@pytest.mark.parametrize("name", ["symmetric", "general", "complex"])
def test_unbiased_with_unbiased_derivatives(name):
    matrix, tangent = CASES[name][0], direction(name)
    values, tangents, _ = sample(name)
    truths = (np.trace(matrix), np.diag(matrix), np.linalg.norm(matrix) ** 2)
    slopes = (np.trace(tangent), np.diag(tangent), 2 * np.vdot(matrix, tangent).real)
    for estimates, truth in zip((*values, *tangents), (*truths, *slopes), strict=True):
        # The largest of 30 |z| stays below 4.2 with probability 99.9 %; a single one also.
        assert np.max(z_scores(estimates, truth)) < 4.2


@pytest.mark.parametrize("name", ["symmetric", variant("general"), "complex"])
def test_standard_errors_are_calibrated(name):
    matrix = CASES[name][0]
    *_, solution = sample(name)
    truths = (np.trace(matrix), np.diag(matrix), np.linalg.norm(matrix))
    parts = (solution.trace, solution.diagonal, solution.frobenius_norm)
    for part, truth in zip(parts, truths, strict=True):
        ratio = np.mean(np.abs(part.value - truth) ** 2) / np.mean(part.std_err**2)
        # Variances over 500 keys are known to about 10 %, and the root is not quite linear.
        assert 0.65 < ratio < 1.45
        np.testing.assert_array_equal(part.stats["std.err"], part.std_err)


@pytest.mark.parametrize("name", ["symmetric", "complex-semidefinite"])
def test_ritz_values_lie_in_the_spectrum_and_near_an_eigenvalue(name):
    matrix, tags, _ = CASES[name]
    spectrum = np.linalg.eigvalsh(matrix)
    solutions = [summarise(key, jnp.asarray(matrix), tags) for key in keys(50)]
    slack = 1e-12 * np.abs(spectrum).max()
    ends = np.array([solution.extreme_eigenvalues for solution in solutions])
    residuals = np.array([solution.eigenvalue_residuals for solution in solutions])
    assert np.all(ends[:, 0] > spectrum[0] - slack)
    assert np.all(ends[:, 1] < spectrum[-1] + slack)
    distance = np.abs(ends[:, :, None] - spectrum).min(-1)
    assert np.all(distance < residuals + slack)
    # Six probes and their products say more than the probes alone: from Omega only, the largest
    # Ritz value would miss by about half of the spectrum.
    assert np.median(spectrum[-1] - ends[:, 1]) < 0.15 * (spectrum[-1] - spectrum[0])


# --- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [variant("symmetric"), "complex"])
def test_derivatives_are_those_of_frozen_weights(name):
    """First and second derivatives of the square of the norm, forward and reverse."""
    matrix, tags, cost = CASES[name]
    tangent, key = direction(name), jax.random.key(5)
    omega = np.asarray(tr.SphereSampler()(key, N, M, matrix.dtype))
    first, second = [], []
    for i in range(M):
        c, g = naive_pieces(matrix, omega, i)
        known, hidden = matrix - c @ matrix @ c, c @ matrix @ g
        known_t, hidden_t = tangent - c @ tangent @ c, c @ tangent @ g
        first.append(2 * (np.vdot(known, known_t) + np.vdot(hidden, hidden_t)).real)
        second.append(2 * (np.linalg.norm(known_t) ** 2 + np.linalg.norm(hidden_t) ** 2))

    @jax.jit
    def derivatives(matrix, tangent):
        def square(t):
            moved = matrix + t.astype(matrix.dtype) * tangent
            return linear_parts(key, moved, M * cost, tags)[0][2]

        zero = jnp.zeros(())
        return jax.grad(square)(zero), jax.hessian(square)(zero)

    slope, curvature = derivatives(jnp.asarray(matrix), jnp.asarray(tangent))
    np.testing.assert_allclose(slope, np.mean(first), rtol=1e-11)
    np.testing.assert_allclose(curvature, np.mean(second), rtol=1e-11)


@pytest.mark.variant
@pytest.mark.parametrize("tags", [SYM, variant(())])
def test_every_nesting_of_transformations(tags):
    base = jnp.asarray(general(np.float64, 12))
    base = base + base.T
    keys_, thetas, shift = keys(2), jnp.array([0.5, 2.0]), jnp.diag(jnp.arange(12.0))

    def loss(theta, key, with_ends=True):
        solution = tr.summary(key, lx.MatrixLinearOperator(base + theta * shift, tags), 9)
        value = solution.frobenius_norm.value + jnp.sin(solution.trace.value)
        value += jnp.sum(jnp.square(solution.diagonal.value))
        if with_ends and tags != ():
            value += jnp.sum(solution.extreme_eigenvalues) + jnp.sum(solution.eigenvalue_residuals)
        return value

    @jax.jit
    def together(thetas, keys_):
        def body(total, x):
            return total + loss(*x), jax.grad(loss)(*x)

        gradients = {"vmap(grad)": jax.vmap(jax.grad(loss))(thetas, keys_)}
        if tags == ():  # the rest is the same for both, and compiles for seconds
            return gradients
        return gradients | {
            "grad(vmap)": jax.grad(lambda t: jnp.sum(jax.vmap(loss)(t, keys_)))(thetas),
            "jvp(vmap)": jax.jvp(
                lambda t: jax.vmap(loss)(t, keys_), (thetas,), (jnp.ones_like(thetas),)
            )[1],
            "scan": jax.lax.scan(body, jnp.zeros(()), (thetas, keys_))[1],
        }

    # Eigenvalues and residuals have no derivative.
    plain = jax.jit(jax.grad(lambda theta, key: loss(theta, key, with_ends=False)))
    expected = [plain(theta, key) for theta, key in zip(thetas, keys_, strict=True)]
    assert np.all(np.abs(expected) > 1e-3)
    for result in together(thetas, keys_).values():
        np.testing.assert_allclose(result, expected, rtol=1e-10)


# --- recovery at any scale -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tags"),
    [
        (np.float32, PSD),
        (np.float32, ()),
        (np.float64, SYM),
        (np.float64, ()),
        (np.complex128, ()),
        (np.complex128, PSD),
    ],
)
def test_low_rank_is_exact_at_any_scale(dtype, tags):
    rng = np.random.default_rng(0)
    n, eps = N, np.finfo(dtype).eps
    left, right = random_unitary(rng, n, dtype)[:, :3], random_unitary(rng, n, dtype)[:, :3]
    sizes = np.array([3.0, -1.0 if tags == SYM else 1.0, 0.5])
    low = (left * sizes) @ (right if tags == () else left).conj().T
    table = {"low": low, "rank1": low @ low.conj().T[:, :1] @ low[:1], "zero": 0 * low}
    table |= {"identity": np.eye(n), "shifted": np.eye(n) + 3 * left[:, :2] @ left[:, :2].conj().T}
    if tags != ():
        table["rank1"] = left[:, :1] @ left[:, :1].conj().T
    for scale in (1.0, 1e20, 1e-20):
        for name, matrix in table.items():
            matrix = (matrix * scale).astype(dtype)
            wide = matrix.astype(np.complex128)
            solution = summarise(jax.random.key(1), jnp.asarray(matrix), tags)
            assert solution.result == tr.RESULTS.successful
            tolerance = 200 * eps * np.abs(wide).max()
            parts = [(solution.frobenius_norm, np.linalg.norm(wide))]
            parts += [(solution.trace, np.trace(wide)), (solution.diagonal, np.diag(wide))]
            # Sphere probes do not see at once that A = I is diagonal; trace and norm do.
            captured = {"identity": parts[:2], "shifted": []}.get(name, parts)
            for part, truth in parts[len(captured) :]:
                error = np.abs(np.asarray(part.value).astype(np.complex128) - truth)
                std_err = np.linalg.norm(np.asarray(part.std_err, np.float64))
                # Of 5 degrees of freedom: P(|t| > 6) = 0.2 %.
                assert np.linalg.norm(error) <= 6 * std_err + tolerance, (name, scale)
                assert std_err < np.linalg.norm(wide), (name, scale)
            for part, truth in captured:
                error = np.abs(np.asarray(part.value).astype(np.complex128) - truth)
                assert np.max(error) <= tolerance, (name, scale)
                assert np.max(np.asarray(part.std_err)) <= tolerance, (name, scale)
            if tags != ():
                # At most three eigenvalues differ from the others: all of them are found.
                ends = np.linalg.eigvalsh(wide)[[0, -1]]
                found = np.asarray(solution.extreme_eigenvalues)
                assert np.max(np.abs(found - ends)) <= tolerance, (name, scale)
                assert np.max(np.asarray(solution.eigenvalue_residuals)) <= tolerance, (name, scale)
    failed = summarise(jax.random.key(1), jnp.full((n, n), np.nan, dtype), tags)
    assert failed.result == tr.RESULTS.nonfinite_operator
    parts = (failed.trace, failed.diagonal, failed.frobenius_norm, failed.extreme_eigenvalues)
    for leaf in jax.tree.leaves([x.value if isinstance(x, tr.Solution) else x for x in parts]):
        assert np.all(np.isnan(leaf))


def test_eigenvalues_of_a_decaying_spectrum():
    eigenvalues = np.concatenate([0.1 ** np.arange(N - 10), -0.8 * 0.1 ** np.arange(10)])
    matrix = with_spectrum(np.random.default_rng(1), eigenvalues)
    solution = summarise(jax.random.key(2), jnp.asarray(matrix), SYM)
    # The span of [Q, Omega] is what two steps of block Krylov with six probes reach.
    errors = np.abs(np.asarray(solution.extreme_eigenvalues) - [-0.8, 1.0])
    assert np.all(errors < 1e-4)
    # The error is of the order of the square of the residual.
    assert np.all(errors < solution.eigenvalue_residuals)
    assert np.all(solution.eigenvalue_residuals < 1e-2)


@pytest.mark.parametrize("name", CASES)
def test_whole_budget_is_exact(name):
    matrix, tags, _ = CASES[name]
    tangent = direction(name)

    @jax.jit
    def run(matrix, tangent):
        def along(t):
            moved = matrix + t.astype(matrix.dtype) * tangent
            return linear_parts(jax.random.key(0), moved, 10 * N, tags)

        return jax.jvp(along, (jnp.zeros(()),), (jnp.ones(()),), has_aux=True)

    values, slopes, solution = run(jnp.asarray(matrix), jnp.asarray(tangent))
    truths = (np.trace(matrix), np.diag(matrix), np.linalg.norm(matrix) ** 2)
    truths_t = (np.trace(tangent), np.diag(tangent), 2 * np.vdot(matrix, tangent).real)
    for estimate, truth in zip((*values, *slopes), (*truths, *truths_t), strict=True):
        np.testing.assert_allclose(estimate, truth, rtol=1e-12, atol=1e-12)
    assert int(solution.num_matvecs) == N
    assert not np.any(solution.diagonal.std_err)
    assert solution.trace.std_err == solution.frobenius_norm.std_err == 0
    if tags != ():
        ends = np.linalg.eigvalsh(matrix)[[0, -1]]
        np.testing.assert_allclose(solution.extreme_eigenvalues, ends, rtol=1e-12, atol=1e-12)
        assert not np.any(solution.eigenvalue_residuals)


# --- structure and errors ------------------------------------------------------------------------


def test_diagonal_has_the_structure_of_the_input():
    parameters = {"w": jnp.zeros((4, 5)), "b": (jnp.zeros(3), jnp.zeros((1, 7)))}
    _, unravel = ravel_pytree(parameters)
    matrix = jnp.asarray(CASES["symmetric"][0])
    operator = lx.FunctionLinearOperator(
        lambda tree: unravel(matrix @ ravel_pytree(tree)[0]),
        jax.eval_shape(lambda: parameters),
        SYM,
    )
    key = jax.random.key(0)
    solution, flat = tr.summary(key, operator, budget(SYM)), summarise(key, matrix, SYM)
    for ours, theirs in (
        (solution.diagonal.value, flat.diagonal.value),
        (solution.diagonal.std_err, flat.diagonal.std_err),
    ):
        assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, parameters)
        np.testing.assert_allclose(ravel_pytree(ours)[0], theirs, rtol=1e-10)
    np.testing.assert_allclose(solution.frobenius_norm.value, flat.frobenius_norm.value)
    shapes = jax.eval_shape(lambda: tr.summary(key, operator, 12))
    assert shapes.trace.value.shape == ()
    assert shapes.extreme_eigenvalues.shape == (2,)


@pytest.mark.variant
def test_a_single_probe_and_bad_arguments():
    key, matrix = jax.random.key(0), jnp.asarray(CASES["symmetric"][0])
    for tags, smallest in ((SYM, 2), ((), 3)):
        operator = lx.MatrixLinearOperator(matrix, tags)
        with pytest.warns(
            UserWarning, match=f"A summary needs at least {smallest} matvecs"
        ) as seen:
            jax.eval_shape(lambda operator=operator: tr.summary(key, operator, 1))
        assert seen[0].filename == __file__
    operator = lx.MatrixLinearOperator(matrix)
    solution = tr.summary(key, operator, 5)
    assert int(solution.num_matvecs) == 3
    (probe,) = np.asarray(tr.SphereSampler()(key, N, 1, np.float64)).T
    product = np.asarray(matrix) @ probe
    for part, value in (
        (solution.trace, probe @ product),
        (solution.diagonal, probe * product),
        (solution.frobenius_norm, np.linalg.norm(product)),
    ):
        np.testing.assert_allclose(part.value, value, rtol=1e-12, atol=1e-12)
        assert np.all(np.isinf(part.std_err))
    with pytest.raises(TypeError, match=r"lineax\.MatrixLinearOperator\(matrix\)"):
        tr.summary(key, matrix, 9)  # pyright: ignore
    with pytest.raises(TypeError, match="must be a JAX random key"):
        tr.summary(0, operator, 9)  # pyright: ignore
    with pytest.raises(TypeError, match="must be a Python int"):
        tr.summary(key, operator, 2.5)  # pyright: ignore
    with pytest.raises(ValueError, match="at least 1 matvec"):
        tr.summary(key, operator, 0)
    with pytest.raises(ValueError, match="square"):
        tr.summary(key, lx.MatrixLinearOperator(matrix[:4]), 3)
    broken = lx.MatrixLinearOperator(matrix.at[0, 0].set(jnp.inf))
    with pytest.raises(Exception, match="NaN or inf"):
        tr.summary(key, broken, 9, throw=True)
