"""Curvature operators: their products, over parameters as they are, and what is made of them."""

import copy
import itertools
import pickle
from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.stats
from jax.flatten_util import ravel_pytree

import traceax as tr
from traceax import curvature

from ..helpers import keys, variant

# A classifier with everything that parameters may hold: floats of several shapes, integers, a
# function, None.
CLASSES, EXAMPLES = 4, 12
WEIGHTS = {"w": jr.normal(jr.key(0), (3, CLASSES)), "b": 0.1 * jnp.arange(float(CLASSES))}
REST = {"steps": jnp.arange(3), "power": 2, "activation": jnp.tanh, "nothing": None}
INPUTS = jr.normal(jr.key(1), (EXAMPLES, 3))
LABELS = jr.randint(jr.key(2), (EXAMPLES,), 0, CLASSES)
N = 3 * CLASSES + CLASSES


def predict(params, inputs, labels):
    return params["power"] * params["activation"](inputs @ params["w"] + params["b"])


def log_likelihood_of(outputs, labels):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(outputs), labels[:, None], axis=1)
    return chosen[:, 0]


def cross_entropy(outputs, inputs, labels):
    return -jnp.mean(log_likelihood_of(outputs, labels))


def loss(params, inputs, labels):
    return cross_entropy(predict(params, inputs, labels), inputs, labels)


def log_likelihood(params, inputs, labels):
    return log_likelihood_of(predict(params, inputs, labels), labels)


def draw_labels(key, params, inputs, labels):
    return inputs, jr.categorical(key, predict(params, inputs, labels))


FLAT, unravel = ravel_pytree(WEIGHTS)


def of_flat(fn):
    """`fn(params, inputs, labels)` as a function of the flat floating-point parameters."""
    return lambda flat: fn({**unravel(flat), **REST}, INPUTS, LABELS)


@cache
def dense(kind):
    """The curvature matrices, by JAX's own dense derivatives."""
    if kind == "hessian":
        return np.asarray(jax.jit(jax.hessian(of_flat(loss)))(FLAT))
    if kind == "fisher":
        jacobian = np.asarray(jax.jit(jax.jacobian(of_flat(log_likelihood)))(FLAT))
        return jacobian.T @ jacobian / EXAMPLES
    jacobian = np.asarray(jax.jit(jax.jacobian(of_flat(predict)))(FLAT))
    if kind == "jacobian_gram":
        return np.einsum("eci,ecj->ij", jacobian, jacobian)
    outputs = of_flat(predict)(FLAT)
    of_outputs = jax.hessian(lambda out: cross_entropy(out, INPUTS, LABELS))
    inner = np.asarray(jax.jit(of_outputs)(outputs))
    return np.einsum("abi,abcd,cdj->ij", jacobian, inner, jacobian)


def make(kind, params, *args, **kwargs):
    """The operator, on (inputs, labels) as two arguments or as one batch."""

    def on_batches(fn):
        return (lambda first, batch: fn(first, *batch)) if "batches" in kwargs else fn

    if kind == "hessian":
        return curvature.hessian(on_batches(loss), params, *args, **kwargs)
    if kind == "fisher":
        return curvature.fisher(on_batches(log_likelihood), params, *args, **kwargs)
    if kind == "jacobian_gram":
        return curvature.jacobian_gram(on_batches(predict), params, *args, **kwargs)
    functions = (on_batches(predict), on_batches(cross_entropy))
    return curvature.gauss_newton(*functions, params, *args, **kwargs)


KINDS = ("hessian", "gauss_newton", "fisher", "jacobian_gram")
BATCHES = (INPUTS.reshape(3, 4, 3), LABELS.reshape(3, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_wrt_leaves_out_what_is_no_parameter(kind):
    truth = dense(kind)[:CLASSES, :CLASSES]
    bias = lambda path, leaf: path == "b"  # noqa: E731
    operator = make(kind, {**WEIGHTS, **REST}, INPUTS, LABELS, wrt=bias)
    assert operator.in_size() == CLASSES
    np.testing.assert_allclose(flat_matrix(operator), truth, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "batched"),
    [*((kind, False) for kind in KINDS), ("hessian", True), ("jacobian_gram", True)],
)
def test_products_and_forms(kind, batched):
    truth = dense(kind)
    params = {**WEIGHTS, **REST}
    if batched:
        # The mean over three batches: of means over examples, but of sums for the Gram matrix.
        truth = truth / 3 if kind == "jacobian_gram" else truth
        operator = make(kind, params, batches=BATCHES)
    else:
        operator = make(kind, params, INPUTS, LABELS)
    # Only what is a floating-point array is differentiated.
    structure = operator.in_structure()
    assert structure == jax.eval_shape(lambda: {**WEIGHTS, **dict.fromkeys(REST)})
    assert operator.in_size() == operator.out_size() == N
    flat = jr.normal(jr.key(3), (N,))
    vector = {**unravel(flat), **dict.fromkeys(REST)}

    @eqx.filter_jit
    def views(operator):
        return (
            operator.as_matrix(),
            lx.linearise(operator).as_matrix(),
            lx.materialise(operator).as_matrix(),
            lx.diagonal(operator),
            ravel_pytree(operator.mv(vector))[0],
            operator.quadratic_form(vector),
        )

    *matrices, diagonal, product, form = views(operator)
    for matrix in matrices:
        np.testing.assert_allclose(matrix, truth, atol=1e-13)
    np.testing.assert_allclose(diagonal, np.diag(truth), atol=1e-13)
    np.testing.assert_allclose(product, truth @ flat, atol=1e-13)
    np.testing.assert_allclose(form, flat @ truth @ flat, rtol=1e-12)
    assert operator.transpose() is operator
    assert lx.is_symmetric(operator)
    assert lx.is_positive_semidefinite(operator) == (kind != "hessian")


@pytest.mark.parametrize(
    "kind", [kind if kind == "gauss_newton" else variant(kind) for kind in KINDS]
)
def test_every_estimate_of_it(kind):
    """Traces, diagonals and blocks with k = n are exact; the default is chosen by the tag."""
    truth = dense(kind)
    operator = make(kind, {**WEIGHTS, **REST}, INPUTS, LABELS)
    np.testing.assert_allclose(tr.trace(jr.key(0), operator, N).value, np.trace(truth), rtol=1e-12)
    diagonal = tr.diagonal(jr.key(0), operator, N).value
    assert diagonal["activation"] is None
    np.testing.assert_allclose(ravel_pytree(diagonal)[0], np.diag(truth), atol=1e-13)
    blocks = tr.block_traces(jr.key(0), operator, N).value
    np.testing.assert_allclose(blocks["b"], np.trace(truth[:CLASSES, :CLASSES]), rtol=1e-12)
    np.testing.assert_allclose(blocks["b"] + blocks["w"], np.trace(truth), rtol=1e-12)


@pytest.mark.parametrize(("batched", "batch_size"), [(False, 3), (True, None)])
def test_hutchinson_by_forms_is_hutchinson_by_products(batched, batch_size):
    """The same probes, once multiplied by the operator and once not."""
    params = {**WEIGHTS, **REST}
    data = {"batches": BATCHES} if batched else {}
    operator = make("gauss_newton", params, *(() if batched else (INPUTS, LABELS)), **data)

    @eqx.filter_jit
    def run(operator, estimator):
        products = lx.FunctionLinearOperator(operator.mv, operator.in_structure())
        return [tr.trace(jr.key(0), op, 10, estimator) for op in (operator, products)]

    ours, theirs = run(operator, tr.HutchinsonEstimator(batch_size=batch_size))
    np.testing.assert_allclose(ours.value, theirs.value, rtol=1e-12)
    np.testing.assert_allclose(ours.std_err, theirs.std_err, rtol=1e-12)


def test_monte_carlo_fisher_is_unbiased():
    """Its expectation is the Gauss-Newton matrix of the cross entropy: a z-test of the trace."""
    truth = np.trace(dense("gauss_newton"))

    @jax.jit
    def traces(keys):
        def one(key):
            operator = make(
                "fisher", {**WEIGHTS, **REST}, INPUTS, LABELS, sample=draw_labels, key=key
            )
            return tr.trace(key, operator, N).value

        return jax.lax.map(one, keys)

    values = np.asarray(traces(keys(1000)))
    standard = values.std(ddof=1) / np.sqrt(1000)
    assert 0 < standard < 0.05 * truth
    assert abs(values.mean() - truth) < 4 * standard


@pytest.mark.parametrize("estimator", [tr.XTraceEstimator(), tr.HutchinsonEstimator()])
def test_the_derivative_of_a_monte_carlo_fisher_is_unbiased(estimator):
    """The labels that are drawn depend on the parameters, too: with labels held fixed the mean of
    this gradient is 0. (Hutchinson's estimator takes the form in place of the product.)
    """
    inputs = jnp.asarray(np.random.default_rng(0).standard_normal((24, 4)))
    params = jnp.asarray(np.random.default_rng(1).standard_normal((4, 3)))
    labels = jnp.zeros(24, int)

    def log_likelihood(params, inputs, labels):
        log_probs = jax.nn.log_softmax(inputs @ params)
        return jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]

    def sample(key, params, inputs, labels):
        return inputs, jr.categorical(key, inputs @ params)

    def true(params):
        probs, traces = jax.nn.softmax(inputs @ params), []
        for label in range(3):
            slopes = jax.jacobian(log_likelihood)(params, inputs, jnp.full(24, label))
            traces.append(probs[:, label] * jnp.sum(slopes**2, axis=(1, 2)))
        return jnp.mean(sum(traces))

    def drawn(params, key):
        options = {"sample": sample, "key": key, "num_samples": 2}
        operator = curvature.fisher(log_likelihood, params, inputs, labels, **options)
        return tr.trace(key, operator, 10, estimator).value

    found = jax.jit(jax.vmap(jax.value_and_grad(drawn), (None, 0)))(params, keys(2000))
    for samples, truth in zip(found, jax.value_and_grad(true)(params), strict=True):
        standard = np.std(samples, axis=0) / np.sqrt(2000)
        assert np.all(np.abs(np.mean(samples, axis=0) - truth) < 4.5 * standard)
    assert np.max(np.abs(jax.grad(true)(params)) / standard) > 20  # what would be missed


@pytest.mark.parametrize("count", [24, 200])
def test_the_mean_of_a_fisher_in_half_precision_is_not_rounded(count):
    """1 / 24 is off by 0.2 % in bfloat16, and with it would be every trace."""
    relative = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        params = jnp.asarray(rng.standard_normal((4, 3)), jnp.bfloat16)
        inputs = jnp.asarray(rng.standard_normal((count, 4)), jnp.bfloat16)
        labels = jnp.asarray(rng.integers(0, 3, count))

        def log_likelihood(params, inputs, labels):
            log_probs = jax.nn.log_softmax(inputs @ params)
            return jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]

        narrow, wide = (
            tr.trace(
                jr.key(0),
                curvature.fisher(
                    log_likelihood, params.astype(dtype), inputs.astype(dtype), labels
                ),
                12,
            ).value.astype(float)
            for dtype in (jnp.bfloat16, jnp.float64)
        )
        relative.append(narrow / wide - 1)
    # Rounding of both signs remains: the mean of 20 is known to a quarter of it.
    assert abs(np.mean(relative)) < 4 * np.std(relative) / np.sqrt(20)
    assert np.std(relative) < 2e-3


def test_monte_carlo_fisher_with_batches_and_samples():
    """Many samples: the error of the matrix is below 6 deviations of its largest entry."""

    def of_batch(fn):
        return lambda params, batch: fn(params, *batch)

    operator = curvature.fisher(
        of_batch(log_likelihood),
        {**WEIGHTS, **REST},
        batches=BATCHES,
        sample=lambda key, params, batch: (draw_labels(key, params, *batch),),
        key=jr.key(0),
        num_samples=4000,
    )
    matrix, truth = operator.as_matrix(), dense("gauss_newton")
    # An entry is a mean of 4000 x 12 products of size |g|^2 <= 4 trace.
    assert np.max(np.abs(matrix - truth)) < 6 * 4 * np.trace(truth) / np.sqrt(4000 * EXAMPLES)
    assert np.max(np.abs(matrix - truth)) > 0
    # The labels are drawn once.
    np.testing.assert_array_equal(matrix, operator.as_matrix())


def test_equinox_module_and_numpy_arrays():
    model = eqx.nn.MLP(3, "scalar", 5, 1, key=jr.key(0))

    def square(model, inputs):
        return jnp.mean(jax.vmap(model)(inputs) ** 2)

    operator = curvature.hessian(square, model, INPUTS)
    assert operator.in_structure().layers[0].weight.shape == (5, 3)
    assert operator.in_structure().activation is None
    exact = eqx.filter_jit(lambda operator: tr.trace(jr.key(0), operator, operator.in_size()).value)
    trace = exact(operator)
    moving, rest = eqx.partition(model, eqx.is_inexact_array)
    flat, unflatten = ravel_pytree(moving)
    matrix = jax.jit(jax.hessian(lambda v: square(eqx.combine(unflatten(v), rest), INPUTS)))(flat)
    np.testing.assert_allclose(trace, np.trace(matrix), rtol=1e-10)

    numpy = curvature.hessian(
        lambda p: jnp.sum(p["x"] ** 2), {"x": np.arange(3.0), "i": np.arange(2)}
    )
    np.testing.assert_allclose(numpy.as_matrix(), 2 * np.eye(3))


def test_mixed_precision_parameters():
    params = {
        "a": jnp.arange(1, 4, dtype=jnp.float32),
        "b": jnp.arange(1, 3, dtype=jnp.float64),
        "c": jnp.ones(2, jnp.bfloat16),
    }

    def quartic(params):
        parts = [jnp.sum(x.astype(jnp.float64) ** 4) for x in params.values()]
        return parts[0] + parts[1] + parts[2]

    operator = curvature.hessian(quartic, params)
    assert [x.dtype for x in jax.tree.leaves(operator.in_structure())] == [
        np.dtype(jnp.float32),
        np.dtype(jnp.float64),
        np.dtype(jnp.bfloat16),
    ]
    # 12 x^2: 12 (1 + 4 + 9) + 12 (1 + 4) + 12 (1 + 1). A diagonal has no error with Rademacher.
    for estimator in (tr.HutchinsonEstimator(), tr.ExactTraceEstimator()):
        value = tr.trace(jr.key(0), operator, 3, estimator).value
        np.testing.assert_allclose(value, 252.0, rtol=1e-6)


@pytest.mark.variant
def test_random_keys_in_the_arguments():
    """Dropout: the key is held constant, so that all products are with the same matrix."""

    def dropped(params, inputs, labels, key):
        mask = jr.bernoulli(key, 0.5, (EXAMPLES, CLASSES))
        return cross_entropy(jnp.where(mask, predict(params, inputs, labels), 0), inputs, labels)

    for key in (jr.key(7), jr.PRNGKey(7)):
        operator = curvature.hessian(dropped, {**WEIGHTS, **REST}, INPUTS, LABELS, key)

        def flat_loss(flat, key=key):
            return dropped({**unravel(flat), **REST}, INPUTS, LABELS, key)

        hessian = jax.hessian(flat_loss)
        matrix = eqx.filter_jit(lambda operator: operator.as_matrix())(operator)
        np.testing.assert_allclose(matrix, jax.jit(hessian)(FLAT), atol=1e-13)

        def trace(weights, key=key):
            operator = curvature.hessian(dropped, {**weights, **REST}, INPUTS, LABELS, key)
            return tr.trace(jr.key(0), operator, 8, tr.HutchinsonEstimator()).value

        # The mean of z^T H z over the probes, differentiated.
        shapes = [leaf.shape for leaf in jax.tree.leaves(WEIGHTS)]
        drawn = tr.RademacherSampler().probes_by_leaf(jr.key(0), shapes, 8, FLAT.dtype)
        probes = np.concatenate([np.asarray(leaf).reshape(-1, 8) for leaf in drawn])
        moment = jnp.asarray(probes @ probes.T / 8)
        truth = jax.jit(jax.grad(lambda flat: jnp.vdot(moment, hessian(flat))))(FLAT)  # noqa: B023
        gradient = ravel_pytree(jax.jit(jax.grad(trace))(WEIGHTS))[0]
        np.testing.assert_allclose(gradient, truth, rtol=1e-9, atol=1e-12)


def test_custom_derivatives():
    """A `custom_vjp` has no forward mode: products do without it, and so must forms."""

    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))
    x = jnp.arange(1.0, 5.0)
    operator = curvature.hessian(lambda x: jnp.sum(cube(x)), x)
    np.testing.assert_allclose(operator.as_matrix(), np.diag(6 * x))
    value = tr.trace(jr.key(0), operator, 2, tr.HutchinsonEstimator()).value
    np.testing.assert_allclose(value, np.sum(6 * x), rtol=1e-12)


# ---------------------------------------------------------------------------------- derivatives


def penalty(weights, key, k=6, estimator=tr.AutoTraceEstimator(), batched=False):
    params = {**weights, **REST}
    if batched:
        operator = make("hessian", params, batches=BATCHES)
    else:
        operator = make("hessian", params, INPUTS, LABELS)
    return tr.trace(key, operator, k, estimator).value


@jax.jit
def exact_penalty(flat):
    return jnp.trace(jax.hessian(of_flat(loss))(flat))


exact_gradient = jax.jit(jax.grad(exact_penalty))


@pytest.mark.parametrize("batched", [False, True])
def test_derivative_of_the_exact_trace(batched):
    """With k = n, first and second derivatives are those of the dense Hessian's trace."""
    flat_penalty = lambda flat: penalty(unravel(flat), jr.key(0), N, batched=batched)  # noqa: E731
    direction = jr.normal(jr.key(5), (N,))

    def both(function):  # forward over reverse
        return jax.jit(lambda v: jax.jvp(jax.grad(function), (FLAT,), (v,)))(direction)

    (gradient, product), (exact, truth) = both(flat_penalty), both(exact_penalty)
    np.testing.assert_allclose(gradient, exact, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(product, truth, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(
    "estimator", [variant(tr.HutchinsonEstimator(batch_size=4)), tr.XTraceEstimator()]
)
def test_derivative_is_unbiased(estimator):
    gradient = jax.grad(lambda flat, key: penalty(unravel(flat), key, 6, estimator))
    samples = np.asarray(
        jax.jit(lambda keys: jax.lax.map(partial(gradient, FLAT), keys))(keys(500))
    )
    error = samples.mean(0) - np.asarray(exact_gradient(FLAT))
    # 16 entries: |z| < 4.5 (1e-4 in all).
    assert np.max(np.abs(error) / (samples.std(0, ddof=1) / np.sqrt(500))) < 4.5


def test_penalised_training_inside_scan():
    """Losses with a Hessian-trace penalty, differentiated in every step of a scan."""

    def objective(weights, key):
        return loss({**weights, **REST}, INPUTS, LABELS) + 0.01 * penalty(weights, key, N)

    def step(weights, key):
        value, gradient = jax.value_and_grad(objective)(weights, key)
        return jax.tree.map(lambda w, g: w - 0.3 * g, weights, gradient), value

    with jax.checking_leaks():
        last, values = jax.jit(lambda w: jax.lax.scan(step, w, keys(10)))(WEIGHTS)
    assert jax.tree.map(jnp.shape, last) == jax.tree.map(jnp.shape, WEIGHTS)

    @jax.jit
    @jax.value_and_grad
    def exact(weights):
        flat = ravel_pytree(weights)[0]
        return of_flat(loss)(flat) + 0.01 * exact_penalty(flat)

    weights = WEIGHTS
    for value in values:
        expected, gradient = exact(weights)
        np.testing.assert_allclose(value, expected, rtol=1e-10)
        weights = jax.tree.map(lambda w, g: w - 0.3 * g, weights, gradient)
    assert values[-1] < values[0]


def test_losses_that_close_over_traced_values():
    """They are hoisted: no leak, and derivatives with respect to them."""

    def value(scale, key):
        def scaled(params, inputs, labels):
            return scale * loss(params, inputs, labels)

        operator = curvature.hessian(scaled, {**WEIGHTS, **REST}, INPUTS, LABELS)
        return tr.trace(key, operator, 8).value

    with jax.checking_leaks():
        total, slope = jax.jit(jax.value_and_grad(value))(jnp.asarray(3.0), jr.key(0))
        batch = jax.jit(jax.vmap(value, (0, None)))(jnp.asarray([1.0, 3.0]), jr.key(0))
    np.testing.assert_allclose(total, 3 * slope, rtol=1e-10)
    np.testing.assert_allclose(batch, [total / 3, total], rtol=1e-10)


# -------------------------------------------------------------------------- a network on digits


@cache
def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.data / 16.0, data.target


SIZES = (64, 96, 40, 10)  # 10,530 parameters


def network(key, dtype):
    layers = []
    for fan_in, fan_out in itertools.pairwise(SIZES):
        key, use = jr.split(key)
        weight = jr.normal(use, (fan_in, fan_out)) / np.sqrt(fan_in)
        layers.append({"w": weight.astype(dtype), "b": jnp.zeros(fan_out, dtype)})
    return layers


def logits(params, batch):
    hidden = batch[0]
    for layer in params[:-1]:
        hidden = jnp.tanh(hidden @ layer["w"] + layer["b"])
    return hidden @ params[-1]["w"] + params[-1]["b"]


def mean_cross_entropy(outputs, batch):
    return -jnp.mean(log_likelihood_of(outputs, batch[1]))


def network_loss(params, batch):
    return mean_cross_entropy(logits(params, batch), batch)


def network_operator(kind, params, batch):
    if kind == "hessian":
        return curvature.hessian(network_loss, params, batch)
    return curvature.gauss_newton(logits, mean_cross_entropy, params, batch)


def data(count, dtype):
    inputs, labels = digits()
    return jnp.asarray(inputs[:count], dtype), jnp.asarray(labels[:count])


@cache
def exact_diagonal(kind):
    """In float64, entry by entry, from JAX's own derivatives of the flat function."""
    params, batch = network(jr.key(0), jnp.float64), data(24, jnp.float64)
    flat, unflatten = ravel_pytree(params)
    if kind == "hessian":
        gradient = jax.grad(lambda flat: network_loss(unflatten(flat), batch))
        _, product = jax.linearize(gradient, flat)

        def entries(indices):
            unit = jax.nn.one_hot(indices, flat.size, dtype=jnp.float64)
            return jnp.sum(jax.vmap(product)(unit) * unit, axis=1)

        blocks = np.arange(flat.size).reshape(-1, 195)
        return unflatten(jax.jit(lambda x: jax.lax.map(entries, x).reshape(-1))(blocks))

    # sum_e J_e^T (diag(p) - p p^T) J_e / N
    def one(example):
        outputs = lambda flat: logits(unflatten(flat), (example[None],))[0]  # noqa: E731
        jacobian, p = jax.jacrev(outputs)(flat), jax.nn.softmax(outputs(flat))
        return p @ jacobian**2 - (p @ jacobian) ** 2

    return unflatten(jnp.mean(jax.jit(lambda x: jax.lax.map(one, x))(batch[0]), axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_digits(kind):
    """float32 estimates against float64 truth: the trace, every layer, every entry."""
    truth = exact_diagonal(kind)
    params, batch = network(jr.key(0), jnp.float32), data(24, jnp.float32)
    operator = network_operator(kind, params, batch)
    assert operator.in_size() > 10_000
    key = jr.key(1)
    for estimator in (tr.AutoTraceEstimator(), tr.HutchinsonEstimator()):
        solution = eqx.filter_jit(tr.trace)(key, operator, 100, estimator)
        exact = sum(float(jnp.sum(x)) for x in jax.tree.leaves(truth))
        assert solution.value.dtype == jnp.float32
        assert abs(float(solution.value) - exact) < 3 * float(solution.std_err)

    blocks = eqx.filter_jit(tr.block_traces)(key, operator, 100)
    values, errors = jax.tree.leaves(blocks.value), jax.tree.leaves(blocks.std_err)
    for value, error, entries in zip(values, errors, jax.tree.leaves(truth), strict=True):
        assert abs(float(value) - float(jnp.sum(entries))) < 3 * float(error)
    assert float(sum(values)) == pytest.approx(exact, abs=3 * float(np.linalg.norm(errors)))

    for estimator in (tr.AutoDiagonalEstimator(), tr.HutchinsonDiagonalEstimator()):
        solution = eqx.filter_jit(tr.diagonal)(key, operator, 100, estimator)
        value, error, exact = (
            np.asarray(ravel_pytree(x)[0], np.float64)
            for x in (solution.value, solution.std_err, truth)
        )
        assert np.mean(np.abs(value - exact) <= 2 * error) > 0.9


@pytest.mark.slow
def test_training_run():
    """300 steps of Adam in one scan, curvature every 10 of them: one trace, right throughout."""
    import optax  # the other tests of this file do without

    batch = data(256, jnp.float32)
    small = data(64, jnp.float32)
    start = network(jr.key(0), jnp.float32)
    optimiser, tracker = optax.adam(3e-3), tr.Tracker()
    traced = []

    def operator_of(params):
        return network_operator("gauss_newton", params, small)

    def step(carry, key):
        params, moments, state, i = carry
        traced.append(1)
        gradient = jax.grad(network_loss)(params, batch)
        updates, moments = optimiser.update(gradient, moments)

        def look(state):
            state, solution = tracker.update(state, key, operator_of(params), 10)
            return state, (solution.value, solution.std_err, *solution.interval(0.999))

        def skip(state):
            return state, (jnp.full((), jnp.nan, jnp.float32),) * 4

        state, seen = jax.lax.cond(i % 10 == 0, look, skip, state)
        return (optax.apply_updates(params, updates), moments, state, i + 1), (params, seen)

    @jax.jit
    def run(params, keys):
        state = tracker.init(operator_of(params), 10)
        carry = (params, optimiser.init(params), state, jnp.asarray(0))
        return jax.lax.scan(step, carry, keys)[1]

    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        path, seen = run(start, keys(300))
        run(start, keys(300, seed=1))
    assert len(traced) == 1  # no second trace for the second run

    @jax.jit
    def exact(params):
        outputs, pull = jax.vjp(lambda params: logits(params, small), params)
        p = jax.nn.softmax(outputs)
        # tr(J^T (diag(p) - p p^T) J) = sum of |J^T l|^2 over the columns l of a root, by examples.
        root = jnp.sqrt(p)[:, :, None] * (jnp.eye(10, dtype=p.dtype)[None] - p[:, None, :])
        root = jnp.swapaxes(root, 1, 2)  # (example, class, column): B B^T = diag(p) - p p^T

        def square(example, column):
            one_hot = jnp.zeros_like(outputs).at[example].set(root[example, :, column])
            (pulled,) = pull(one_hot)
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(pulled))

        columns = jax.vmap(square, (None, 0))
        return jnp.sum(jax.lax.map(lambda e: columns(e, jnp.arange(10)), jnp.arange(64))) / 64

    looked = np.arange(0, 300, 10)
    assert np.all(np.isnan(np.delete(seen, looked, axis=1)))
    values, errors, lower, upper = np.asarray(seen)[:, looked]
    truths = np.array([exact(jax.tree.map(lambda x: x[i], path)) for i in looked])  # noqa: B023
    # With four to five degrees of freedom, one of 30 looks may be off by four standard errors. Each
    # interval holds but for 0.1 %. The mean square of 30 normal scores varies by sqrt(2 / 30); over
    # 40 seeds it was 1.01 on average.
    scores = (values - truths) / errors
    print("tracked over exact:", np.round(values / truths, 3))
    assert np.all((lower <= truths) & (truths <= upper))
    assert np.mean(scores**2) < 1 + 4 * np.sqrt(2 / 30)
    # It is worth having: the trace of this run changes by far more than its error.
    assert np.max(truths) > 1.5 * np.min(truths)


@pytest.mark.slow
def test_memory_of_ten_million_parameters():
    """Hutchinson with 200 probes: no more than 12 vectors above what the gradient takes."""
    sizes = (1000, 2000, 2000, 1600, 1000)
    shapes = list(itertools.pairwise(sizes))
    params = [
        {
            "w": jax.ShapeDtypeStruct(shape, jnp.float32),
            "b": jax.ShapeDtypeStruct(shape[1:], jnp.float32),
        }
        for shape in shapes
    ]
    n = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert n > 10_000_000
    batch = (
        jax.ShapeDtypeStruct((16, 1000), jnp.float32),
        jax.ShapeDtypeStruct((16,), jnp.int32),
    )

    def vectors(fn):
        compiled = jax.jit(fn).lower(params, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * n)

    gradient = vectors(jax.grad(network_loss))
    # With the default probes one vector and a little.
    for sampler, most in ((tr.RademacherSampler(), 2), (tr.SphereSampler(), 12)):
        estimator = tr.HutchinsonEstimator(sampler, batch_size=8)

        def trace(params, batch, estimator=estimator):
            operator = curvature.hessian(network_loss, params, batch)
            return tr.trace(jr.key(0), operator, 200, estimator).value

        assert vectors(trace) - gradient <= most


@pytest.mark.parametrize("estimate", ["trace", "diagonal", "block_traces"])
def test_hutchinson_never_concatenates_the_parameters(estimate):
    estimator = tr.HutchinsonDiagonalEstimator(batch_size=2)
    if estimate == "trace":
        estimator = tr.HutchinsonEstimator(batch_size=2)
    n = 16 * 16 * 4
    params = [jnp.ones((16, 16)) for _ in range(4)]
    operator = curvature.hessian(lambda p: sum(jnp.sum(x**4) for x in p), params)

    # What runs is the lowered implementation.
    arrays, rest = eqx.partition(operator, eqx.is_array)

    def program(key, arrays):
        return getattr(tr, estimate)(key, eqx.combine(arrays, rest), 6, estimator).value

    text = jax.jit(program).lower(jr.key(0), arrays).as_text()
    sizes = []
    for line in text.splitlines():
        if "stablehlo.concatenate" in line:
            shape = line.rsplit("tensor<", 1)[1].split("x")[:-1]
            sizes.append(np.prod([int(s) for s in shape]))
    assert not sizes or max(sizes) < n


# ------------------------------------------------------------------------------------ bad input


def message(fn):
    with pytest.raises((ValueError, TypeError)) as caught:
        fn()
    return str(caught.value)


def test_bad_input():
    params = {**WEIGHTS, **REST}
    assert "scalar" in message(lambda: curvature.hessian(predict, params, INPUTS, LABELS))
    assert "(12, 4)" in message(lambda: curvature.hessian(predict, params, INPUTS, LABELS))
    assert "scalar" in message(lambda: curvature.hessian(lambda p: 1.0, params))
    assert "auxiliary" in message(lambda: curvature.hessian(lambda p: (p["b"].sum(), 1), params))
    assert "scalar" in message(
        lambda: curvature.gauss_newton(predict, lambda out, *_: out, params, INPUTS, LABELS)
    )
    assert "floating-point" in message(
        lambda: curvature.hessian(loss, {"n": 3, "i": jnp.arange(2)})
    )
    assert "complex" in message(
        lambda: curvature.hessian(lambda p: jnp.sum(p.real), jnp.ones(2, jnp.complex64))
    )
    assert "predict must return" in message(
        lambda: curvature.gauss_newton(lambda p: jnp.arange(3), lambda out: out, params)
    )
    assert "(N,)" in message(lambda: curvature.fisher(predict, params, INPUTS, LABELS))
    both = "needs both `sample` and `key`"
    assert both in message(
        lambda: curvature.fisher(log_likelihood, params, INPUTS, LABELS, key=jr.key(0))
    )
    assert "num_samples" in message(
        lambda: curvature.fisher(log_likelihood, params, INPUTS, LABELS, num_samples=0)
    )
    assert "tuple of 2" in message(
        lambda: curvature.fisher(
            log_likelihood, params, INPUTS, LABELS, sample=lambda *a: LABELS, key=jr.key(0)
        )
    )
    ragged = (BATCHES[0], BATCHES[1][:2])
    assert "(2, 4)" in message(lambda: make("hessian", params, batches=ragged))
    assert "leading axis" in message(lambda: make("hessian", params, batches=(jnp.asarray(1.0),)))
    assert "PyTree of arrays" in message(lambda: make("hessian", params, batches=("text",)))


def test_a_list_of_batches():
    """Something else than `batches`: the error that it leads to says what to do."""
    batches = [(INPUTS, LABELS), (INPUTS, LABELS)]
    with pytest.raises((TypeError, ValueError)) as caught:
        make("hessian", {**WEIGHTS, **REST}, batches=batches)
    assert any("Stack a list of batches" in note for note in caught.value.__notes__)


def test_not_square():
    jacobian = lx.JacobianLinearOperator(lambda x, _: jnp.concatenate([x, x]), jnp.ones(3))
    assert "6 x 3" in message(lambda: tr.trace(jr.key(0), jacobian, 2))


# ------------------------------------------------------------------------------ factory and modes


def flat_matrix(operator):
    return eqx.filter_jit(lambda operator: operator.as_matrix())(operator)


def test_factory_is_the_hessian_and_traces_once():
    calls = []

    def counted(params, inputs, labels):
        calls.append(1)
        return loss(params, inputs, labels), {"aux": inputs}

    make_it = curvature.of(counted, has_aux=True)
    with pytest.raises(ValueError, match="has_aux=True"):
        curvature.of(counted)({**WEIGHTS, **REST}, INPUTS, LABELS)
    calls.clear()
    seen = []
    for scale in (1.0, 0.5, 2.0):
        weights = jax.tree.map(lambda x, s=scale: s * x, WEIGHTS)
        operator = make_it({**weights, **REST}, np.asarray(INPUTS), LABELS)
        seen.append(len(calls))
        flat = ravel_pytree(weights)[0]
        truth = jax.jit(jax.hessian(of_flat(loss)))(flat)
        np.testing.assert_allclose(flat_matrix(operator), truth, atol=1e-12)
        same = tr.trace(jr.key(0), make("hessian", {**weights, **REST}, INPUTS, LABELS), 6)
        ours = tr.trace(jr.key(0), operator, 6)
        np.testing.assert_allclose(ours.value, same.value, rtol=1e-12)
    assert seen[0] > 0
    # Never again, neither for the operator nor in the estimates of the other parameters.
    assert len(calls) == seen[0]
    # Other shapes, dtypes, or Python values are other programs.
    make_it({**WEIGHTS, **REST}, INPUTS[:4], LABELS[:4])
    assert len(calls) > seen[0]
    before = len(calls)
    make_it({**WEIGHTS, **REST, "power": 3}, INPUTS, LABELS)
    assert len(calls) > before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copy_of_a_factory_that_was_used(copied):
    make_it = curvature.of(loss)
    first = make_it({**WEIGHTS, **REST}, INPUTS, LABELS)
    again = copied(make_it)({**WEIGHTS, **REST}, INPUTS, LABELS)
    np.testing.assert_array_equal(flat_matrix(again), flat_matrix(first))


def test_factory_under_transformations():
    """Inside `jit`, with derivatives, and with a loss that closes over what is traced."""
    make_it = curvature.of(loss)

    def value(flat, scale):
        operator = make_it({**unravel(flat), **REST}, INPUTS * scale, LABELS)
        return tr.trace(jr.key(0), operator, N).value

    one = jnp.asarray(1.0)
    gradient = jax.jit(jax.grad(value))(FLAT, one)
    np.testing.assert_allclose(gradient, exact_gradient(FLAT), rtol=1e-9, atol=1e-12)
    # The arguments are differentiated as well.
    step = 1e-5
    slope = jax.jit(jax.grad(value, 1))(FLAT, one)
    difference = (value(FLAT, one + step) - value(FLAT, one - step)) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=1e-6)
    np.testing.assert_allclose(value(FLAT, one), exact_penalty(FLAT), rtol=1e-10)

    @jax.jit
    def closing_over(scale):
        operator = curvature.of(lambda p, x, y: scale * loss(p, x, y))(
            {**WEIGHTS, **REST}, INPUTS, LABELS
        )
        return operator.as_matrix()

    for scale in (1.0, 3.0):
        truth = scale * dense("hessian")
        np.testing.assert_allclose(closing_over(jnp.asarray(scale)), truth, atol=1e-12)


def test_selection_and_groups():
    """Statistics are no parameters; layers that are stacked have a name each."""
    params = {
        "params": {"stack": jr.normal(jr.key(0), (3, 2, 2)), "out": jnp.ones((2,))},
        "batch_stats": jnp.ones(2),
    }

    def stacked(params, x):
        for i in range(3):
            x = jnp.tanh(params["params"]["stack"][i] @ x + params["batch_stats"])
        return jnp.sum((params["params"]["out"] * x) ** 2)

    def groups(path, leaf):
        return [f"layer {i}" for i in range(3)] if "stack" in path else path.split("/")[-1]

    make_it = curvature.of(stacked, wrt=lambda p, x: p.startswith("params/"), groups=groups)
    operator = make_it(params, jnp.arange(2.0))
    assert operator.in_size() == 14
    flat, unflatten = ravel_pytree(params["params"])
    matrix = jax.hessian(lambda v: stacked({**params, "params": unflatten(v)}, jnp.arange(2.0)))(
        flat
    )
    blocks = tr.block_traces(jr.key(0), operator, 14).value
    # `out` comes first in the flat parameters.
    expected = {"out": np.trace(matrix[:2, :2])}
    for i in range(3):
        part = slice(2 + 4 * i, 6 + 4 * i)
        expected[f"layer {i}"] = np.trace(matrix[part, part])
    assert set(blocks) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(blocks[name], value, rtol=1e-10)

    pairs = tr.eigenpairs(jr.key(0), operator, 14)
    vector = make_it.ungroup(params, jax.tree.map(lambda x: x[0], pairs.vectors))
    found = ravel_pytree(vector["params"])[0]
    np.testing.assert_allclose(matrix @ found, pairs.values[0] * found, atol=1e-10)
    assert vector["batch_stats"] is None


def test_weights_of_ragged_batches():
    """12 examples in batches of 5, the last of which is padded: the Hessian of all."""
    padded = jax.tree.map(
        lambda x: jnp.concatenate([x, jnp.zeros((3, *x.shape[1:]), x.dtype)]), (INPUTS, LABELS)
    )
    mask = (jnp.arange(15) < EXAMPLES).reshape(3, 5)
    batches = (padded[0].reshape(3, 5, 3), padded[1].reshape(3, 5), mask)

    def masked(params, batch):
        inputs, labels, mask = batch
        logs = log_likelihood_of(predict(params, inputs, labels), labels)
        return -jnp.sum(jnp.where(mask, logs, 0)) / jnp.maximum(jnp.sum(mask), 1).astype(float)

    make_it = curvature.of(masked, weights=lambda batch: jnp.sum(batch[2]))
    truth = dense("hessian")
    params = {**WEIGHTS, **REST}
    np.testing.assert_allclose(flat_matrix(make_it(params, batches=batches)), truth, atol=1e-12)
    operator = curvature.hessian(masked, params, batches=batches, weights=[5, 5, 2])
    np.testing.assert_allclose(flat_matrix(operator), truth, atol=1e-12)
    # A whole batch of padding does not count, whatever it holds.
    nothing = jax.tree.map(lambda x: jnp.zeros_like(x[:1]), batches)
    nothing = (nothing[0] * jnp.nan, *nothing[1:])
    more = jax.tree.map(lambda *x: jnp.concatenate(x), batches, nothing)
    np.testing.assert_allclose(flat_matrix(make_it(params, batches=more)), truth, atol=1e-12)
    equal = curvature.hessian(masked, params, batches=batches)
    assert np.max(np.abs(flat_matrix(equal) - truth)) > 1e-3


def test_derivative_beside_padding_that_holds_nan():
    """NaN of a batch of weight 0 reaches neither the value nor its derivatives."""

    def loss(params, batch):
        return jnp.mean((jnp.tanh(params) * batch) ** 2)

    batches = jnp.linspace(1, 2, 12).reshape(3, 4)

    def value(params, batches, **weights):
        operator = curvature.hessian(loss, params, batches=batches, **weights)
        return tr.trace(jr.key(0), operator, 4).value

    params = jnp.linspace(-0.5, 0.5, 4)
    expected, slope = jax.value_and_grad(value)(params, batches[:2])
    # (First, too: what stands in for the padding is not the first batch.)
    for order in ([0, 1, 2], [2, 0, 1]):
        padded = batches.at[2].set(jnp.nan)[jnp.array(order)]
        weights = jnp.array([1.0, 1.0, 0.0])[jnp.array(order)]
        found, gradient = jax.value_and_grad(value)(params, padded, weights=weights)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        np.testing.assert_allclose(gradient, slope, rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_means_of_many_batches_in_half_precision(dtype):
    """A sum of 3000 terms in half precision ceases to grow at 256, or 2048; large weights overflow
    in float16.
    """

    def loss(params, batch):
        return 0.5 * jnp.sum(params * params * batch)

    def model(params, batch):
        return params * jnp.sqrt(batch)

    params, batches = jnp.ones(4, dtype), jnp.ones((3000, 4), dtype)
    half = 0.5 * jnp.ones((), dtype)
    for operator in (
        curvature.hessian(loss, params, batches=batches),
        curvature.hessian(loss, params, batches=batches[:10], weights=jnp.full(10, 1e5)),
        curvature.hessian(loss, params, batches=batches[:10], weights=jnp.full(10, 1e38)),
        curvature.gauss_newton(model, lambda y, _: half * jnp.sum(y * y), params, batches=batches),
        curvature.jacobian_gram(model, params, batches=batches),
    ):
        np.testing.assert_array_equal(tr.trace(jr.key(0), operator, 4).value, 4)
        form = operator.quadratic_form(params)
        assert form.dtype in (dtype, jnp.float32)  # squares are summed in single precision
        np.testing.assert_array_equal(form, 4)

    # The derivative is a sum over the batches, too.
    def value(params, batches):
        operator = curvature.hessian(
            lambda params, batch: jnp.sum(jnp.sin(params) * batch), params, batches=batches
        )
        return tr.trace(jr.key(0), operator, 4).value

    gradient = jax.grad(value)(params, batches)
    assert gradient.dtype == dtype
    # -cos(1), to the rounding of the function itself.
    np.testing.assert_allclose(gradient.astype(float), -np.cos(1), rtol=0.02)


@pytest.mark.parametrize("batched", [False, True])
def test_model_and_loss_with_arguments_of_their_own(batched):
    def model(params, inputs):
        return predict(params, inputs, None)

    def criterion(outputs, labels):
        return -jnp.mean(log_likelihood_of(outputs, labels)), None

    params = {**WEIGHTS, **REST}
    if batched:
        make_it = curvature.of(
            lambda out, batch, _: criterion(out, batch[1]),
            predict=lambda p, batch: model(p, batch[0]),
            has_aux=True,
        )
        operator = make_it(params, (), (LABELS,), batches=BATCHES)
    else:
        make_it = curvature.of(criterion, predict=model, has_aux=True)
        operator = make_it(params, (INPUTS,), (LABELS,))
    np.testing.assert_allclose(flat_matrix(operator), dense("gauss_newton"), atol=1e-12)
    assert lx.is_positive_semidefinite(operator)
    if not batched:
        # The quadratic form has no second derivative of the model either.
        vector = {**unravel(jr.normal(jr.key(3), (N,))), **dict.fromkeys(REST)}
        flat = ravel_pytree(vector)[0]
        form = flat @ dense("gauss_newton") @ flat
        np.testing.assert_allclose(operator.quadratic_form(vector), form, rtol=1e-10)


@jax.custom_vjp
def opaque(x):
    return jnp.sum(jnp.tanh(x) * x)


def _opaque_bwd(x, g):
    def host(x):
        return np.asarray(np.tanh(x) + x / np.cosh(x) ** 2, x.dtype)

    return (g * jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x,
                                  vmap_method="sequential"),)  # fmt: skip


opaque.defvjp(lambda x: (opaque(x), x), _opaque_bwd)


@pytest.mark.variant
@pytest.mark.parametrize("dtype", [np.float64, variant(np.float32)])
def test_gradients_without_a_derivative(dtype):
    """Differences of gradients are good to eps^(2/3), and say so."""
    x = jnp.linspace(-1, 2, 12).astype(dtype)

    def total(x):
        return opaque(x) + jnp.sum(x) ** 2

    operator = curvature.hessian(total, x, mode="finite-difference")
    slopes = jax.vmap(jax.grad(jax.grad(lambda x: jnp.tanh(x) * x)))(x)
    truth = np.asarray(jnp.diag(slopes) + 2)
    error = np.finfo(dtype).eps ** (2 / 3) * np.linalg.norm(truth)
    found = np.asarray(operator.as_matrix())
    assert found.dtype == dtype
    assert np.max(np.abs(found - truth)) < 2 * error
    # The matrix is not exact: a test with no error at all would test something else.
    assert np.max(np.abs(found - truth)) > 0
    huge = operator.mv(1e30 * jnp.ones_like(x))
    np.testing.assert_allclose(huge / 1e30, truth.sum(1), atol=20 * error)
    np.testing.assert_array_equal(operator.mv(jnp.zeros_like(x)), 0)
    solution = tr.trace(jr.key(0), operator, 6)
    assert solution.std_err > error / 4
    assert abs(float(solution.value) - np.trace(truth)) < 5 * float(solution.std_err)
    # Exact values are only as exact as the products.
    exact, diagonal = tr.trace(jr.key(0), operator, 12), tr.diagonal(jr.key(0), operator, 12)
    apart = np.abs(np.asarray(diagonal.value) - np.diag(truth))
    assert np.all(apart <= 4 * np.asarray(diagonal.std_err))
    assert abs(float(exact.value) - np.trace(truth)) <= float(exact.std_err) <= 2.1 * error
    assert np.isfinite(exact.interval()[1])
    pairs = tr.eigenpairs(jr.key(0), operator, 8)
    assert np.linalg.eigvalsh(truth)[-1] - float(pairs.values[0]) + error > 0
    assert abs(float(pairs.values[0]) - np.linalg.eigvalsh(truth)[-1]) <= float(pairs.errors[0])


@pytest.mark.parametrize("dtype", [np.float32, variant(np.float64), variant(jnp.bfloat16)])
@pytest.mark.parametrize("scale", [0.1, 0.5])
def test_the_step_of_a_difference_is_that_of_the_largest_move(scale, dtype):
    """Along a unit vector one parameter moves, along a random one all do: for the trace of a
    network with 360 parameters by unit vectors, steps of one norm are wrong by up to 11 standard
    errors of rounding, steps of one largest move by 2 at most.
    """
    rng = np.random.default_rng(1)
    params = {
        "w": jnp.asarray(scale * rng.standard_normal((4, 60)), dtype),
        "b": jnp.asarray(0.1 * rng.standard_normal(60), dtype),
        "v": jnp.asarray(scale * rng.standard_normal((60, 1)), dtype),
    }
    x = jnp.asarray(rng.standard_normal((32, 4)), dtype)

    def loss(params, x):
        outputs = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]
        return jnp.mean((outputs - jnp.sin(x[:, :1])) ** 2)

    differences = curvature.hessian(loss, params, x, mode="finite-difference")
    wide = jax.tree.map(lambda x: x.astype(float), (params, x))
    truth = np.asarray(curvature.hessian(loss, *wide).as_matrix())
    solution = tr.trace(jr.key(0), differences, len(truth))
    error = abs(float(solution.value) - np.trace(truth))
    assert 0 < error < 2 * float(solution.std_err)
    # It is not large standard errors that make this easy.
    assert float(solution.std_err) < (0.4 if dtype == jnp.bfloat16 else 1e-3) * np.trace(truth)


def mixed(dtype, seed=0):
    """A classifier with parameters of float32 that computes in `dtype`."""
    rng = np.random.default_rng(seed)
    shapes = {"w": (8, 6), "v": (6, 3)}
    params = {
        name: jnp.asarray(rng.standard_normal(s) / s[0] ** 0.5, jnp.float32)
        for name, s in shapes.items()
    }
    x, labels = rng.standard_normal((32, 8)).astype(np.float32), rng.integers(0, 3, 32)

    def loss(params):
        hidden = jnp.tanh(jnp.asarray(x).astype(dtype) @ params["w"].astype(dtype))
        outputs = (hidden @ params["v"].astype(dtype)).astype(jnp.float32)
        return -jnp.mean(log_likelihood_of(outputs, labels))

    return loss, params


@pytest.mark.parametrize("dtype", [jnp.bfloat16, variant(jnp.float16)])
@pytest.mark.parametrize("mode", ["forward", variant("reverse"), "finite-difference"])
def test_a_network_in_mixed_precision_says_what_its_products_are_worth(mode, dtype):
    """Parameters and products are of float32, and rounded to half precision in between: errors
    contain the rounding, and nothing is reported as not symmetric.
    """
    off = []
    for seed in range(8):
        loss, params = mixed(dtype, seed)
        operator = curvature.hessian(loss, params, mode=mode)
        unit = float(jnp.finfo(dtype).eps)
        assert operator.precision >= 2 * unit
        if mode == "finite-difference":
            np.testing.assert_allclose(operator.precision, 4 * unit ** (2 / 3))
        truth = np.asarray(curvature.hessian(mixed(jnp.float32, seed)[0], params).as_matrix())
        values = np.linalg.eigvalsh(truth)
        exact = tr.trace(jr.key(seed), operator, len(truth))
        off.append((float(exact.value) - values.sum()) / float(exact.std_err))
        pairs = tr.eigenpairs(jr.key(seed), operator, 20)
        assert pairs.result == tr.RESULTS.successful
        # Differences in bfloat16 are good to a sixth.
        most = values[-1] * (1 if mode == "finite-difference" else 1 / 4)
        assert abs(float(pairs.values[0]) - values[-1]) < float(pairs.errors[0]) < most
    if mode == "forward":
        # Of normal numbers the root of the mean square exceeds 1.6 once in 10,000 times.
        assert 0.2 < np.sqrt(np.mean(np.square(off))) < 1.6
    else:
        assert np.max(np.abs(off)) < 3
    total = tr.spectral_sum(jr.key(0), jnp.exp, operator, 20)
    assert total.result == tr.RESULTS.successful
    assert abs(float(total.value) - np.exp(values).sum()) < 3 * float(total.std_err)


def test_half_precision_that_no_vector_passes_through_does_not_count():
    """Data that are stored in half precision, and factors that do not depend on the parameters."""
    data = jnp.ones((3, 4), jnp.bfloat16)

    def loss(params, data):
        factor = jnp.sum(jax.jit(lambda x: x * x)(data), dtype=jnp.bfloat16)
        return factor.astype(jnp.float32) * jnp.sum(jnp.sin(data.astype(jnp.float32) @ params))

    for mode in ("forward", "reverse"):
        operator = curvature.hessian(loss, jnp.ones(4, jnp.float32), data, mode=mode)
        assert operator.precision == np.finfo(np.float32).eps


def test_reverse_mode():
    """The same matrix, also through a `custom_vjp`; with batches too."""

    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))
    x = jnp.arange(1.0, 5.0)
    operator = curvature.hessian(lambda x: jnp.sum(cube(x)), x, mode="reverse")
    np.testing.assert_allclose(operator.as_matrix(), np.diag(6 * x))
    operator = make("hessian", {**WEIGHTS, **REST}, batches=BATCHES, mode="reverse")
    np.testing.assert_allclose(flat_matrix(operator), dense("hessian"), atol=1e-12)


# ------------------------------------------------------------------------------ noise of gradients


def one_loss(params, example):
    return loss(params, *jax.tree.map(lambda x: x[None], example))


@pytest.mark.parametrize("batch_size", [variant(5), 100])
def test_noise_scale_is_that_of_the_dense_covariance(batch_size):
    jacobian = np.asarray(jax.jacobian(of_flat(log_likelihood))(FLAT))
    truth = np.trace(np.cov(jacobian.T))
    params = {**WEIGHTS, **REST}
    noise = curvature.noise_scale(one_loss, params, (INPUTS, LABELS), batch_size=batch_size)
    square = np.sum(jacobian.mean(0) ** 2) - truth / EXAMPLES
    np.testing.assert_allclose(noise.trace, truth, rtol=1e-10)
    np.testing.assert_allclose(noise.square, square, rtol=1e-10)
    np.testing.assert_allclose(noise.scale, truth / square, rtol=1e-10)
    np.testing.assert_allclose(noise.norms, np.sum(jacobian**2, axis=1), rtol=1e-10)
    assert f"scale={noise.scale:.7g}, " in repr(noise)
    # The jackknife, by leaving out one example after the other.
    kept = [np.delete(jacobian, i, axis=0) for i in range(EXAMPLES)]
    traces = np.array([np.trace(np.cov(each.T)) for each in kept])
    squares = np.array([np.sum(x.mean(0) ** 2) for x in kept]) - traces / (EXAMPLES - 1)
    spread = np.sqrt(EXAMPLES - 1)
    for values, error in (
        (traces, noise.trace_std_err),
        (squares, noise.square_std_err),
        (traces / squares, noise.scale_std_err),
    ):
        np.testing.assert_allclose(error, spread * values.std(), rtol=1e-8)


def test_noise_scale_of_some_of_the_parameters_compiles_once(caplog):
    params = {**WEIGHTS, **REST}

    def with_aux(params, example):
        return one_loss(params, example), example

    def noise_of(scale):
        scaled = {**params, "w": scale * params["w"]}
        bias = lambda path, leaf: path == "b"  # noqa: E731
        options = {"wrt": bias, "has_aux": True}
        return curvature.noise_scale(with_aux, scaled, (INPUTS, LABELS), **options)

    jacobian = np.asarray(jax.jacobian(of_flat(log_likelihood))(FLAT))[:, :CLASSES]
    with jax.log_compiles():
        first = noise_of(1.0).trace
        assert "Compiling jit(_noise_scale)" in caplog.text
        caplog.clear()
        second = noise_of(2.0).trace
        assert "Compiling jit(_noise_scale)" not in caplog.text
    np.testing.assert_allclose(first, np.trace(np.cov(jacobian.T)), rtol=1e-10)
    assert not np.isclose(first, second)


def test_noise_scale_is_unbiased_and_its_errors_are_right():
    """Normal gradients: z-tests of tr(Sigma) = 20 and |G|^2 = 1, and their errors."""

    @jax.jit
    def run(keys):
        def one(key):
            examples = jr.normal(key, (40, 5)) * 2 + jnp.sqrt(0.2)
            return curvature.noise_scale(lambda p, x: jnp.sum(p * x), jnp.ones(5), examples)

        return jax.lax.map(one, keys)

    noise = jax.tree.map(np.asarray, run(keys(2000)))
    for value, error, truth in (
        (noise.trace, noise.trace_std_err, 20.0),
        (noise.square, noise.square_std_err, 1.0),
    ):
        deviation = value.std(ddof=1)
        assert abs(value.mean() - truth) < 4 * deviation / np.sqrt(2000)
        # (The standard deviation of 2000 deviations is known to 1/sqrt(4000), 1.6 %.)
        assert 0.9 < np.sqrt(np.mean(error**2)) / deviation < 1.15


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_noise_scale_in_half_precision(dtype):
    """Sums over 5000 examples, and squares of gradients of 300, in float32: as with gradients that
    are float32 to begin with.
    """
    examples = (300 + 300 * jr.normal(jr.key(0), (5000, 2))).astype(dtype)
    found, expected = (
        curvature.noise_scale(lambda p, x: jnp.sum(p * x), jnp.ones(2, kind), examples.astype(kind))
        for kind in (dtype, jnp.float32)
    )
    for name in ("trace", "square", "scale", "trace_std_err", "square_std_err", "scale_std_err"):
        assert getattr(found, name).dtype == jnp.float32
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0.02)


def test_noise_scale_of_many_examples():
    """The square of their number is no 32-bit integer."""
    with jax.enable_x64(False):
        examples = 1 + jr.normal(jr.key(0), (50_000, 1))
        noise = curvature.noise_scale(
            lambda p, x: jnp.sum(p * x), jnp.ones(1), examples, batch_size=5000
        )
    np.testing.assert_allclose(noise.trace, np.var(np.asarray(examples), ddof=1), rtol=1e-4)
    # |G|^2 = (mean)^2, whose standard error is 2 sigma |G| / sqrt(N).
    np.testing.assert_allclose(noise.square_std_err, 2 / np.sqrt(50_000), rtol=0.05)


def test_noise_without_a_mean():
    """Where |G|^2 is not positive, the scale is infinite, and never NaN."""
    examples = jnp.asarray([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    noise = curvature.noise_scale(lambda p, x: jnp.sum(p * x), jnp.ones(2), examples)
    assert noise.square < 0
    assert np.isinf(noise.scale)
    assert np.isinf(noise.scale_std_err)
    same = curvature.noise_scale(lambda p, x: jnp.sum(p * x), jnp.ones(2), jnp.ones((2, 2)))
    np.testing.assert_allclose([same.trace, same.scale], 0, atol=1e-12)


# ------------------------------------------------- traces of single examples, and of the square


def example_loss(params, example):
    """Third derivatives make the Hessians of single examples differ."""
    inputs, target = example
    hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - target) ** 2)


def example_problem():
    """A network of 61 parameters, and eight examples."""
    k1, k2, k3, k4 = jr.split(jr.key(1), 4)
    params = {"w1": jr.normal(k1, (4, 10)), "b1": jnp.zeros(10), "w2": jr.normal(k2, (10, 1))}
    return params, (jr.normal(k3, (8, 4)), jr.normal(k4, (8, 1)))


def dense_hessian(loss, params, data):
    flat, unflatten = ravel_pytree(params)
    return np.asarray(jax.hessian(lambda flat: loss(unflatten(flat), data))(flat))


def assert_unbiased_and_covered(missed, errors, dof):
    """Over the keys of the first axis: the mean, and how often two errors contain the truth, which
    is a matter of Student's distribution.
    """
    count = len(missed)
    z = np.mean(missed, axis=0) / (np.std(missed, axis=0, ddof=1) / np.sqrt(count))
    assert np.all(np.abs(z) < 4.5), z
    expected = 1 - 2 * scipy.stats.t.sf(2, dof)
    within = np.mean(np.abs(missed) <= 2 * errors, axis=0)
    deviations = (within - expected) / np.sqrt(expected * (1 - expected) / count)
    assert np.all(np.abs(deviations) < 4.5), within
    print("z", z, "within two errors", within, "expected", expected)


@pytest.mark.slow
def test_traces_of_single_examples_are_unbiased_and_calibrated():
    """As on the page of curvature: `vmap` over the examples."""
    params, examples = example_problem()
    truth = [
        np.trace(dense_hessian(example_loss, params, (x, y)))
        for x, y in zip(*examples, strict=True)
    ]

    @jax.jit
    def traces(key):
        def one(key, example):
            operator = curvature.hessian(example_loss, params, example)
            solution = tr.trace(key, operator, 20)
            return solution.value, solution.std_err

        return jax.vmap(one)(jr.split(key, 8), examples)

    values, errors = map(np.asarray, jax.lax.map(traces, jr.split(jr.key(2), 1000)))
    # XTrace with ten probes
    assert_unbiased_and_covered(values - np.asarray(truth), errors, 9)


@pytest.mark.slow
def test_the_trace_of_the_square_is_unbiased_and_calibrated():
    """As on the page of curvature: the square of the Frobenius norm, and twice the norm times its
    error.
    """
    params, examples = example_problem()

    def loss(params, batch):
        return jnp.mean(jax.vmap(lambda example: example_loss(params, example))(batch))

    truth = np.sum(dense_hessian(loss, params, examples) ** 2)

    @jax.jit
    def square(key):
        norm = tr.frobenius_norm(key, curvature.hessian(loss, params, examples), 40)
        return norm.value**2, 2 * norm.value * norm.std_err

    values, errors = map(np.asarray, jax.lax.map(square, jr.split(jr.key(3), 1000)))
    # XNysTrace of the square with twenty probes
    assert_unbiased_and_covered(values - truth, errors, 19)
