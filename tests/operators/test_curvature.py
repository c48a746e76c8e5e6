"""Curvature operators: their products, over parameters as they are, and what is made of them."""

import re
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tr
from traceax import curvature

from ..helpers import keys

# A classifier with everything that parameters may hold: floats of several shapes, integers, a
# function, None.
CLASSES, EXAMPLES = 4, 12
_rng = np.random.default_rng(0)
WEIGHTS = {
    "w": jax.device_put(_rng.standard_normal((3, CLASSES))),
    "b": jax.device_put(0.1 * np.arange(CLASSES)),
}
REST = {"steps": jax.device_put(np.arange(3)), "power": 2, "activation": jnp.tanh, "nothing": None}
INPUTS = jax.device_put(_rng.standard_normal((EXAMPLES, 3)))
LABELS = jax.device_put(_rng.integers(0, CLASSES, EXAMPLES))
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


def linear_log_likelihood(params, inputs, labels):
    return log_likelihood_of(inputs @ params, labels)


FLAT, unravel = ravel_pytree(WEIGHTS)


def of_flat(fn):
    """`fn(params, inputs, labels)` as a function of the flat floating-point parameters."""
    return lambda flat: fn({**unravel(flat), **REST}, INPUTS, LABELS)


@cache
def all_dense():
    """The curvature matrices, by JAX's own dense derivatives."""

    @jax.jit
    def run(flat):
        inner = jax.hessian(lambda out: cross_entropy(out, INPUTS, LABELS))
        return (
            jax.hessian(of_flat(loss))(flat),
            jax.jacobian(of_flat(log_likelihood))(flat),
            jax.jacobian(of_flat(predict))(flat),
            inner(of_flat(predict)(flat)),
        )

    hessian, scores, jacobian, inner = map(np.asarray, run(FLAT))
    return {
        "hessian": hessian,
        "fisher": scores.T @ scores / EXAMPLES,
        "gauss_newton": np.einsum("abi,abcd,cdj->ij", jacobian, inner, jacobian),
    }


def dense(kind):
    return all_dense()[kind]


def make(kind, params, *args, **kwargs):
    """The operator, on (inputs, labels) as two arguments or as one batch."""

    def called(fn, has_aux=kwargs.get("has_aux", False)):
        def function(first, *data):
            value = fn(first, *(data[0] if "batches" in kwargs else data))
            return (value, data) if has_aux else value

        return function

    if kind == "gauss_newton":
        functions = called(predict, has_aux=False), called(cross_entropy)
        return curvature.gauss_newton(*functions, params, *args, **kwargs)
    functions = {"hessian": loss, "fisher": log_likelihood}
    return getattr(curvature, kind)(called(functions[kind]), params, *args, **kwargs)


KINDS = ("hessian", "gauss_newton", "fisher")
BATCHES = jax.device_put((np.reshape(INPUTS, (3, 4, 3)), np.reshape(LABELS, (3, 4))))
PARAMS = {**WEIGHTS, **REST}


@eqx.filter_jit
def flat_matrix(operator):
    return operator.as_matrix()


@pytest.mark.parametrize(
    ("kind", "batched"), [*((kind, False) for kind in KINDS), ("hessian", True)]
)
def test_products_and_forms(kind, batched):
    truth = dense(kind)
    args, data = ((), {"batches": BATCHES}) if batched else ((INPUTS, LABELS), {})
    operator = make(kind, PARAMS, *args, **data)
    options = {"wrt": lambda path, leaf: path == "b", "groups": lambda path, leaf: "bias"}
    bias = make(kind, PARAMS, *args, **data, **options, has_aux=True)
    assert bias.in_structure() == jax.eval_shape(lambda: {"bias": WEIGHTS["b"]})
    # Only what is a floating-point array is differentiated.
    assert operator.in_structure() == jax.eval_shape(lambda: {**WEIGHTS, **dict.fromkeys(REST)})
    assert operator.in_size() == operator.out_size() == N
    flat = np.random.default_rng(3).standard_normal(N)
    vector = {**unravel(flat), **dict.fromkeys(REST)}

    @eqx.filter_jit
    def views(operator, bias):
        matrices = [op.as_matrix() for op in (operator, lx.linearise(operator), bias)]
        product = ravel_pytree(operator.mv(vector))[0]
        return *matrices, lx.diagonal(operator), product, operator.mean(operator.form, vector)

    matrix, linear, part, diagonal, product, form = views(operator, bias)
    np.testing.assert_allclose(matrix, truth, atol=1e-13)
    np.testing.assert_allclose(linear, truth, atol=1e-13)
    np.testing.assert_allclose(part, truth[:CLASSES, :CLASSES], atol=1e-13)
    np.testing.assert_allclose(diagonal, np.diag(truth), atol=1e-13)
    np.testing.assert_allclose(product, truth @ flat, atol=1e-13)
    np.testing.assert_allclose(form, flat @ truth @ flat, rtol=1e-12)
    assert operator.transpose() is operator
    assert lx.is_symmetric(operator)
    assert lx.is_positive_semidefinite(operator) == (kind != "hessian")


def test_the_derivative_of_a_monte_carlo_fisher_is_unbiased():
    """The labels that are drawn depend on the parameters, too: with labels held fixed the mean of
    this gradient is 0. (Hutchinson's estimator takes the form in place of the product.)
    """
    inputs = np.random.default_rng(0).standard_normal((24, 4))
    params = np.random.default_rng(1).standard_normal((4, 3))
    labels = np.zeros(24, int)

    def sample(key, params, inputs, labels):
        return inputs, jr.categorical(key, inputs @ params)

    def true(params):
        probs, traces = jax.nn.softmax(inputs @ params), []
        for label in range(3):
            slopes = jax.jacobian(linear_log_likelihood)(params, inputs, jnp.full(24, label))
            traces.append(probs[:, label] * jnp.sum(slopes**2, axis=(1, 2)))
        return jnp.mean(sum(traces))

    def drawn(params, key):
        options = {"sample": sample, "key": key, "num_samples": 2}
        operator = curvature.fisher(linear_log_likelihood, params, inputs, labels, **options)
        estimators = tr.XTraceEstimator(), tr.HutchinsonEstimator()
        return jnp.stack([tr.trace(key, operator, 10, each).value for each in estimators])

    def both(params, key):
        values, pull = jax.vjp(lambda params: drawn(params, key), params)
        return values, jax.vmap(lambda ct: pull(ct)[0])(jnp.eye(2))

    run = jax.jit(
        lambda *given: (jax.vmap(both, (None, 0))(*given), jax.value_and_grad(true)(params))
    )
    for samples, truth in zip(*jax.device_get(run(params, keys(2000))), strict=True):
        standard = np.std(samples, axis=0) / np.sqrt(2000)
        assert np.all(np.abs(np.mean(samples, axis=0) - truth) < 4.5 * standard)
    assert np.max(np.abs(truth) / standard) > 20  # what would be missed


def test_the_mean_of_a_fisher_in_half_precision_is_not_rounded():
    """1 / 24 is off by 0.2 % in bfloat16, and with it would be every trace."""

    @jax.jit
    @jax.vmap
    def relative(key):
        given = jr.normal(key, (4, 3)), jr.normal(jr.fold_in(key, 1), (24, 4))
        labels = jr.randint(key, (24,), 0, 3)

        def trace(dtype):
            params, inputs = (x.astype(jnp.bfloat16).astype(dtype) for x in given)
            operator = curvature.fisher(linear_log_likelihood, params, inputs, labels)
            return tr.trace(jr.key(0), operator, 12).value.astype(float)

        return trace(jnp.bfloat16) / trace(jnp.float64) - 1

    # Rounding of both signs remains: the mean of 20 is known to a quarter of it.
    found = np.asarray(relative(keys(20)))
    assert abs(np.mean(found)) < 4 * np.std(found) / np.sqrt(20)
    assert np.std(found) < 2e-3


def test_mixed_precision_parameters():
    dtypes = {"a": jnp.float32, "b": jnp.float64, "c": jnp.bfloat16}
    params = {name: jnp.asarray(np.arange(1, 4), dtype) for name, dtype in dtypes.items()}

    def quartic(params):
        return sum(jnp.sum(x.astype(jnp.float64) ** 4) for x in params.values())

    operator = curvature.hessian(quartic, params)
    assert {name: x.dtype for name, x in operator.in_structure().items()} == dtypes
    # 12 x^2: a diagonal has no error with Rademacher.
    value = tr.trace(jr.key(0), operator, 3, tr.HutchinsonEstimator()).value
    np.testing.assert_allclose(value, 3 * 12 * 14, rtol=1e-6)


def test_models_without_a_forward_mode():
    """A `custom_vjp` has none: products do without it, and so must forms; also in reverse mode."""

    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))
    x = np.arange(1.0, 5.0)

    @jax.jit
    def run(x):
        modes = "forward", "reverse"
        operators = [curvature.hessian(lambda x: jnp.sum(cube(x)), x, mode=mode) for mode in modes]
        given = 2, tr.HutchinsonEstimator()
        batched = make("hessian", PARAMS, batches=BATCHES, mode="reverse")
        traces = [tr.trace(jr.key(0), operator, *given).value for operator in operators]
        return [operator.as_matrix() for operator in operators], traces, batched.as_matrix()

    matrices, traces, batched = run(x)
    np.testing.assert_allclose(matrices, [np.diag(6 * x)] * 2)
    np.testing.assert_allclose(traces, np.sum(6 * x), rtol=1e-12)
    np.testing.assert_allclose(batched, dense("hessian"), atol=1e-12)


# ---------------------------------------------------------------------------------- derivatives


def test_derivative_of_the_exact_trace():
    """With k = n, first and second derivatives are those of the dense Hessian's trace, of operators
    from a function that traces a loss once; also by the data.
    """
    make_it = curvature.of(lambda params, batch: loss(params, *batch))

    def value(flat, scale):
        params = {**unravel(flat), **REST}
        operator = make_it(params, batches=(scale * BATCHES[0], BATCHES[1]))
        return tr.trace(jr.key(0), operator, N).value

    def exact(flat, scale):
        def at(flat):
            return loss({**unravel(flat), **REST}, scale * INPUTS, LABELS)

        return jnp.trace(jax.hessian(at)(flat))

    direction = np.random.default_rng(5).standard_normal(N)

    @jax.jit
    def derivatives(flat, scale):
        def of(fn):  # forward over reverse
            first = lambda flat: jax.grad(fn, (0, 1))(flat, scale)  # noqa: E731
            return jax.jvp(first, (flat,), (direction,))

        return of(value), of(exact)

    (firsts, seconds), (slopes, curvatures) = derivatives(FLAT, 1.0)
    for found, expected in zip(firsts, slopes, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    for found, expected in zip(seconds, curvatures, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-11)


def test_losses_that_close_over_traced_values():
    """They are hoisted: no leak, and derivatives with respect to them."""

    def value(scale, key):
        def scaled(params, inputs, labels):
            return scale * loss(params, inputs, labels)

        operator = curvature.hessian(scaled, PARAMS, INPUTS, LABELS)
        return tr.trace(key, operator, 4, tr.HutchinsonEstimator()).value

    with jax.checking_leaks():
        one, many = jax.value_and_grad(value), jax.vmap(value, (0, None))
        both = jax.jit(lambda scales, key: (one(scales[1], key), many(scales, key)))
        (total, slope), batch = both(np.array([1.0, 3.0]), jr.key(0))
    np.testing.assert_allclose(batch, [slope, 3 * slope], rtol=1e-10)
    np.testing.assert_allclose(total, batch[1], rtol=1e-10)


# ---------------------------------------------------------------------------------------- memory


def test_hutchinson_never_concatenates_the_parameters():
    estimator = tr.HutchinsonEstimator(batch_size=2)
    params = [np.ones((16, 16)) for _ in range(4)]

    # What runs is the lowered implementation.
    @jax.jit
    def program(key, params):
        operator = curvature.hessian(lambda p: sum(jnp.sum(x**4) for x in p), params)
        functions = tr.trace, tr.diagonal, tr.block_traces
        return [function(key, operator, 6, estimator).value for function in functions]

    text = program.lower(jr.key(0), params).as_text()
    shapes = re.findall(r"stablehlo.concatenate.*tensor<([\dx]+)x\w+>$", text, re.MULTILINE)
    sizes = [np.prod([int(size) for size in shape.split("x")]) for shape in shapes]
    assert max(sizes, default=0) < 16 * 16 * 4


# ------------------------------------------------------------------------------ factory and modes


def test_factory_is_the_hessian_and_traces_once():
    calls = []

    def counted(params, inputs, labels):
        calls.append(1)
        return loss(params, inputs, labels), {"aux": inputs}

    make_it, seen = curvature.of(counted, has_aux=True), []
    hessian = jax.jit(jax.hessian(of_flat(loss)))
    for scale in (1.0, 0.5, 2.0):
        flat = scale * np.asarray(FLAT)
        operator = make_it({**unravel(flat), **REST}, np.asarray(INPUTS), LABELS)
        seen.append(len(calls))
        value = tr.trace(jr.key(0), operator, N).value
        np.testing.assert_allclose(value, np.trace(hessian(flat)), atol=1e-12)
    # Never again, neither for the operator nor in the estimates of the other parameters.
    assert 0 < seen[0] == len(calls)
    # Other shapes, or Python values, are other programs.
    make_it(PARAMS, INPUTS[:4], LABELS[:4])
    assert len(calls) > seen[0]
    before = len(calls)
    make_it({**PARAMS, "power": 2.0}, INPUTS, LABELS)
    assert len(calls) > before


def test_selection_and_groups():
    """Statistics are no parameters; layers that are stacked have a name each."""
    start = np.random.default_rng(6).standard_normal(14)

    def unflatten(flat):
        moving = {"stack": flat[:12].reshape(3, 2, 2), "out": flat[12:]}
        return {"params": moving, "batch_stats": np.ones(2)}

    def stacked(params, x):
        for i in range(3):
            x = jnp.tanh(params["params"]["stack"][i] @ x + params["batch_stats"])
        return jnp.sum((params["params"]["out"] * x) ** 2)

    def groups(path, leaf):
        return [f"layer {i}" for i in range(3)] if "stack" in path else path.split("/")[-1]

    def of_params(path, leaf):
        return path.startswith("params/")

    make_it = curvature.of(stacked, wrt=of_params, groups=groups)
    operator = make_it(unflatten(start), np.arange(2.0))
    assert operator.in_size() == 14

    @jax.jit
    def run(flat):
        pairs = tr.eigenpairs(jr.key(0), operator, 14)
        first = jax.tree.map(lambda x: x[0], pairs.vectors)
        vector = curvature.ungroup(first, unflatten(flat), groups, of_params)
        hessian = jax.hessian(lambda v: stacked(unflatten(v), np.arange(2.0)))(flat)
        return hessian, tr.block_traces(jr.key(0), operator, 14).value, pairs.values[0], vector

    matrix, blocks, value, vector = jax.device_get(run(start))
    diagonal = np.diag(matrix)
    expected = {f"layer {i}": np.sum(diagonal[4 * i : 4 * i + 4]) for i in range(3)}
    expected["out"] = np.sum(diagonal[12:])
    assert blocks == pytest.approx(expected, rel=1e-10)
    found = np.concatenate([np.ravel(vector["params"][name]) for name in ("stack", "out")])
    np.testing.assert_allclose(matrix @ found, value * found, atol=1e-10)
    assert vector["batch_stats"] is None


def test_one_factory_for_groups_of_other_shapes():
    """A group of six numbers does not say which leaves they are."""
    make_it = curvature.of(lambda p: jnp.sum(p["w"][0] ** 3), groups=lambda path, leaf: "all")
    for shape in ((2, 3), (3, 2)):
        params = {"w": np.arange(1.0, 7).reshape(shape), "i": np.arange(2)}
        expected = np.where(np.arange(6) < shape[1], 6 * np.arange(1.0, 7), 0)
        # (Its Hessian is diagonal.)
        np.testing.assert_allclose(flat_matrix(make_it(params)), np.diag(expected))


def test_weights_of_ragged_batches():
    """12 examples in batches of 5, the last of which is padded: the Hessian of all. A whole batch
    of padding does not count, whatever it holds.
    """
    nothing = np.where(np.arange(8)[:, None] < 3, np.zeros(3), np.nan)
    inputs = np.concatenate([INPUTS, nothing]).reshape(4, 5, 3)
    labels = np.concatenate([LABELS, np.zeros(8, LABELS.dtype)]).reshape(4, 5)
    mask = (np.arange(20) < EXAMPLES).reshape(4, 5)

    def masked(params, batch):
        inputs, labels, mask = batch
        logs = log_likelihood_of(predict(params, inputs, labels), labels)
        return -jnp.sum(jnp.where(mask, logs, 0)) / jnp.maximum(jnp.sum(mask), 1).astype(float)

    batches = inputs, labels, mask
    for weights in (np.sum(mask, axis=1), [5, 5, 2, 0]):
        operator = curvature.of(masked)(PARAMS, batches=batches, weights=weights)
        np.testing.assert_allclose(flat_matrix(operator), dense("hessian"), atol=1e-12)
    equal = curvature.hessian(masked, PARAMS, batches=jax.tree.map(lambda x: x[:3], batches))
    assert np.max(np.abs(np.asarray(flat_matrix(equal)) - dense("hessian"))) > 1e-3


def test_derivative_beside_padding_that_holds_nan():
    """NaN of a batch of weight 0 reaches neither the value nor its derivatives, but that by this
    weight: no batch that stands in for it is differentiated in its place.
    """

    def loss(params, batch):
        return jnp.mean((jnp.tanh(params) * batch) ** 2)

    batches = np.linspace(1, 2, 12).reshape(3, 4)

    @jax.jit
    @jax.value_and_grad
    def both(given, batches):
        params, weights = given
        operator = curvature.hessian(loss, params, batches=batches, weights=weights)
        return tr.trace(jr.key(0), operator, 4).value

    params = np.linspace(-0.5, 0.5, 4)
    expected, (slope, by_weights) = both((params, np.array([1.0, 1.0])), batches[:2])
    # (It comes first: what stands in for the padding is not the first batch.)
    padded = np.concatenate([np.full((1, 4), np.nan), batches[:2]])
    found, (gradient, by_weight) = both((params, np.array([0.0, 1.0, 1.0])), padded)
    np.testing.assert_allclose([found, *gradient], [expected, *slope], rtol=1e-12)
    np.testing.assert_allclose(by_weight, [np.nan, *by_weights], rtol=1e-12)


def test_means_of_many_batches_in_half_precision():
    """A sum of 3000 terms in half precision ceases to grow at 2048; large weights overflow."""
    dtype = jnp.float16
    params, batches = np.ones(4, dtype), np.ones((3000, 4), dtype)

    def loss(params, batch):
        return 0.5 * jnp.sum(params * params * batch)

    @jax.jit
    def run(params, batches, weights):
        given = (batches, None), (batches[:10], weights)
        operators = [curvature.hessian(loss, params, batches=x, weights=w) for x, w in given]
        fns = lambda p, batch: p * jnp.sqrt(batch), lambda y, _: dtype(0.5) * jnp.sum(y * y)
        operators.append(curvature.gauss_newton(*fns, params, batches=batches))
        forms = [operator.mean(operator.form, params) for operator in operators]
        traces = [tr.trace(jr.key(0), operator, 4).value for operator in operators]
        return forms, traces, jax.grad(value)(params, batches)

    # The derivative is a sum over the batches, too.
    def value(params, batches):
        sines = lambda params, batch: jnp.sum(jnp.sin(params) * batch)  # noqa: E731
        return tr.trace(jr.key(0), curvature.hessian(sines, params, batches=batches), 4).value

    forms, traces, gradient = run(params, batches, np.full(10, 4e307))
    for form, trace in zip(forms, traces, strict=True):
        assert form.dtype in (dtype, jnp.float32)  # squares are summed in single precision
        assert (form, trace) == (4, 4)
    assert gradient.dtype == dtype
    # -cos(1), to the rounding of the function itself.
    np.testing.assert_allclose(gradient.astype(float), -np.cos(1), rtol=0.02)


def test_model_and_loss_with_arguments_of_their_own():
    def model(params, batch):
        return predict(params, batch[0], None)

    def criterion(outputs, batch, sign):
        return sign * jnp.mean(log_likelihood_of(outputs, batch[1])), None

    make_it = curvature.of(criterion, predict=model, has_aux=True)
    operator = make_it(PARAMS, (), (jnp.asarray(-1.0),), batches=BATCHES)
    np.testing.assert_allclose(flat_matrix(operator), dense("gauss_newton"), atol=1e-12)
    assert lx.is_positive_semidefinite(operator)


@jax.custom_vjp
def opaque(x):
    return jnp.sum(jnp.tanh(x) * x)


def _opaque_bwd(x, g):
    def host(x):
        return np.asarray(np.tanh(x) + x / np.cosh(x) ** 2, x.dtype)

    return (g * jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x,
                                  vmap_method="sequential"),)  # fmt: skip


opaque.defvjp(lambda x: (opaque(x), x), _opaque_bwd)


def test_gradients_without_a_derivative():
    """Differences of gradients are good to eps^(2/3), and say so."""
    dtype = np.float32
    x = jnp.asarray(np.linspace(-1, 2, 12).astype(dtype))

    total = lambda x: opaque(x) + jnp.sum(x) ** 2  # noqa: E731
    operator = curvature.hessian(total, x, mode="finite-difference")

    @jax.jit
    def run(x):
        estimates = tr.trace(jr.key(0), operator, 6), tr.trace(jr.key(0), operator, 12)
        return (
            jax.vmap(jax.grad(jax.grad(lambda x: jnp.tanh(x) * x)))(x),
            operator.as_matrix(),
            [operator.mv(jnp.full_like(x, number)) for number in (1e30, 0.0)],
            (*estimates, tr.eigenpairs(jr.key(0), operator, 8)),
        )

    slopes, found, (huge, zero), (solution, exact, pairs) = jax.device_get(run(x))
    truth = np.diag(slopes) + dtype(2)
    error = np.finfo(dtype).eps ** (2 / 3) * np.linalg.norm(truth)
    assert found.dtype == dtype
    # The matrix is not exact: a test with no error at all would test something else.
    assert 0 < np.max(np.abs(found - truth)) < 2 * error
    np.testing.assert_allclose(huge / dtype(1e30), truth.sum(1), atol=20 * error)
    np.testing.assert_array_equal(zero, 0)
    assert solution.std_err > error / 4
    assert abs(float(solution.value) - np.trace(truth)) < 5 * float(solution.std_err)
    # Exact values are only as exact as the products.
    assert abs(float(exact.value) - np.trace(truth)) <= float(exact.std_err) <= 2.1 * error
    assert abs(float(pairs.values[0]) - np.linalg.eigvalsh(truth)[-1]) <= float(pairs.errors[0])


def test_the_step_of_a_difference_is_that_of_the_largest_move():
    """Along a unit vector one parameter moves, along a random one all do: for the trace of a
    network with 360 parameters by unit vectors, steps of one norm are wrong by up to 11 standard
    errors of rounding, steps of one largest move by 2 at most.
    """
    rng = np.random.default_rng(1)
    sizes = {"w": (0.5, (4, 60)), "b": (0.1, 60), "v": (0.5, (60, 1))}
    params = {
        name: jnp.asarray(size * rng.standard_normal(shape), jnp.float32)
        for name, (size, shape) in sizes.items()
    }
    x = jnp.asarray(rng.standard_normal((32, 4)), jnp.float32)

    def loss(params, x):
        outputs = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]
        return jnp.mean((outputs - jnp.sin(x[:, :1])) ** 2)

    differences = curvature.hessian(loss, params, x, mode="finite-difference")
    wide = jax.tree.map(lambda x: np.asarray(x, float), (params, x))
    truth = np.trace(flat_matrix(curvature.hessian(loss, *wide)))
    solution = tr.trace(jr.key(0), differences, differences.in_size())
    error = abs(float(solution.value) - truth)
    assert 0 < error < 2 * float(solution.std_err)
    # It is not large standard errors that make this easy.
    assert float(solution.std_err) < 1e-3 * truth


def test_half_precision_counts_where_a_vector_passes_through():
    """Not in data, nor in factors that do not depend on the parameters."""
    data = jnp.ones((3, 4), jnp.bfloat16)

    def loss(params, data):
        factor = jnp.sum(jax.jit(lambda x: x * x)(data), dtype=jnp.bfloat16)
        return factor.astype(jnp.float32) * jnp.sum(jnp.sin(data.astype(jnp.float32) @ params))

    def rounded(params, data):
        outputs = data.astype(jnp.float32) @ params
        return jnp.sum(jnp.sin(outputs.astype(jnp.bfloat16)), dtype=jnp.float32)

    def precision(loss, mode):
        return curvature.hessian(loss, jnp.ones(4, jnp.float32), data, mode=mode).precision

    unit = float(jnp.finfo(jnp.bfloat16).eps)
    for mode in ("forward", "reverse"):
        assert precision(loss, mode) == np.finfo(np.float32).eps
        assert precision(rounded, mode) >= 2 * unit
    np.testing.assert_allclose(precision(rounded, "finite-difference"), 4 * unit ** (2 / 3))
