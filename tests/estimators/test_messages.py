"""Every message of the package is reached by a call of the table, and is a sentence or two.

A `raise` or a warning in the package that no call reaches fails the test of its room.
"""

import ast
import tempfile
import traceback
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse as ss
from jax.experimental import sparse as jsparse

import traceax as tr
from traceax import curvature
from traceax._cli import _parser, _run
from traceax._core.verdict import _OUTCOMES
from traceax.testing import check_estimator

from ..helpers import PSD, by_products, register_tags

PACKAGE = Path(tr.__file__).parent
N, KEY = 6, jax.random.key(0)
EYE, ONES, TALL, NONE = jax.device_put((np.eye(N), np.ones(N), np.eye(N, 3), np.eye(0)))
SYMMETRIC = lx.MatrixLinearOperator(EYE, lx.symmetric_tag)
POSITIVE = lx.MatrixLinearOperator(EYE, PSD)
LARGE = lx.MatrixLinearOperator(jax.device_put(np.eye(80)), PSD)
HIDDEN = by_products(np.eye(80), PSD)  # what the default estimators cannot read
PLAIN = lx.MatrixLinearOperator(EYE)
COMPLEX = lx.MatrixLinearOperator(jax.device_put(np.eye(N, dtype=complex)))
FUNCTION = lx.FunctionLinearOperator(lambda v: v, jax.ShapeDtypeStruct((N,), float), PSD)
SQUARE = lx.FunctionLinearOperator(lambda v: v * v, jax.ShapeDtypeStruct((N,), float))
MIXED = lx.FunctionLinearOperator(lambda v: v.astype(complex), jax.ShapeDtypeStruct((N,), float))
SPARSE = tr.SparseLinearOperator(ss.eye_array(N).tocsr(), lx.symmetric_tag)
KERNEL = tr.KernelLinearOperator


class Liar(lx.AbstractLinearOperator):
    """An operator with complex products that says that it is real."""

    def mv(self, vector):
        return 1j * vector

    def as_matrix(self):
        return 1j * EYE

    def transpose(self):
        return self

    def in_structure(self):
        return jax.ShapeDtypeStruct((N,), float)

    out_structure = in_structure


register_tags(Liar, lambda operator: False)


class OfTraces(tr.AbstractTraceEstimator):
    """An estimator without diagonals."""

    def compute(self, key, operator, k, weights):
        return tr.HutchinsonEstimator().compute(key, operator, k, weights)


class Short(lx.AbstractLinearOperator):
    """An operator whose products have other sizes than it says."""

    def mv(self, vector):
        return vector[:3]

    def as_matrix(self):
        raise NotImplementedError

    def transpose(self):
        return self

    def in_structure(self):
        return jax.ShapeDtypeStruct((9,), float)

    out_structure = in_structure


for ask in (lx.is_symmetric, lx.is_positive_semidefinite, lx.is_negative_semidefinite):
    ask.register(Short)(lambda operator: False)


def solution(value):
    return tr.Solution(value, jnp.abs(value), jnp.asarray(1), {}, tr.RESULTS.successful)


def command(*words, a=EYE):
    """The command line for a file with this array, up to where it would print the message."""

    def call():
        with tempfile.TemporaryDirectory() as folder:
            np.save(f"{folder}/a.npy", a)
            _run(_parser().parse_args([words[0], f"{folder}/a.npy", *words[1:]]))

    return call


def twice(fn):
    return jax.eval_shape(jax.grad(jax.grad(fn)), 1.0)


def of(loss=lambda p, *args: jnp.sum(p), has_aux=False, **options):
    return curvature.of(loss, has_aux=has_aux, **options)


def fisher(value=lambda p, x: p["w"] * x, **options):
    operator = curvature.fisher(value, {"w": jnp.asarray(1.0)}, ONES, **options)
    return jax.eval_shape(operator.mv, operator.in_structure())


def hessian(value=lambda p: jnp.sum(p["w"] ** 2), params=None, **options):
    operator = curvature.hessian(value, {"w": ONES} if params is None else params, **options)
    return jax.eval_shape(operator.mv, operator.in_structure())


def built(how=tr.NystromPreconditioner(rank=2)):
    return how.build(KEY, POSITIVE)


WRONG = [{"shifts": []}, {"fallback": "cholesky"}, {"preconditioner": "none"}, {"atol": 0.1}]
CALLS = [
    # The key, the operator, the budget.
    lambda: tr.trace(0, PLAIN, 4),
    *[partial(tr.trace, KEY, lx.MatrixLinearOperator(x), 4) for x in (NONE, TALL)],
    *[partial(tr.trace, KEY, operator, 4) for operator in (EYE, Short(), MIXED, Liar())],
    lambda: tr.eigenvalue_count(KEY, POSITIVE, 3.0, 1, 4),
    lambda: tr.diagonal(KEY, SQUARE, 4, tr.XTraceEstimator()),
    lambda: tr.trace(KEY, PLAIN * 1j, 4),
    lambda: jax.jit(lambda k: tr.trace(KEY, PLAIN, k).value)(4),
    *[partial(tr.trace, KEY, PLAIN, k) for k in (True, 0)],
    lambda: tr.trace(KEY, PLAIN, 1, tr.XTraceEstimator()),
    # The estimator.
    *[partial(tr.trace, KEY, PLAIN, 4, x) for x in (tr.XTraceEstimator, tr.XNysTraceEstimator())],
    lambda: tr.diagonal(KEY, HIDDEN, 4, OfTraces()),
    lambda: tr.HutchinsonEstimator(batch_size=0),
    lambda: tr.XTraceEstimator(improved=True, shrink=True),
    lambda: tr.XTraceEstimator(tr.SphereSampler(), shrink=True),
    lambda: tr.trace(KEY, PLAIN, 4, tr.XTraceEstimator(tr.NormalSampler(complex))),
    lambda: tr.trace(KEY, COMPLEX, 4, tr.XTraceEstimator(tr.NormalSampler(float), improved=True)),
    lambda: tr.NormalSampler(int),
    lambda: tr.RademacherSampler(bool),
    lambda: tr.SteinhausSampler(float),
    lambda: tr.NormalSampler()(KEY, 4, 2, int),
    lambda: tr.HutchinsonEstimator("rademacher"),
    # A tolerance in place of a budget.
    lambda: tr.trace(KEY, PLAIN, 4, rtol=0.1),
    *[partial(tr.trace, KEY, PLAIN, rtol=rtol) for rtol in (None, "small", -1.0)],
    lambda: solution(jnp.ones(())).interval(95),
    # Functions of matrices.
    lambda: tr.spectral_sum(KEY, jnp.log, PLAIN, 4, shifts=1.0),
    *[partial(tr.spectral_sum, KEY, fn, PLAIN, 4) for fn in (jnp.abs, jnp.floor)],
    lambda: tr.spectral_sum(KEY, SYMMETRIC, jnp.log, 4),
    lambda: twice(lambda t: tr.spectral_sum(KEY, jnp.exp, t * PLAIN, 4).value),
    lambda: of(mode="jvp"),
    lambda: of(predict=jnp.sum, mode="reverse"),
    lambda: of(lambda p: 1.0, True)(ONES),
    lambda: of(lambda p: (1.0, 2))(ONES),
    lambda: of(wrt="a")({"a": ONES}),
    lambda: of(wrt=lambda *_: False)({"a": ONES}),
    lambda: curvature.hessian(lambda p, x: p @ x, ONES, batches=jnp.eye(N), weights=[1, 2]),
    lambda: of(predict=jnp.sin)(ONES, np.ones(3)),
    lambda: of(groups=lambda path, x: 3)({"a": ONES}),
    lambda: of(groups=lambda path, x: "all")([ONES, ONES.astype(jnp.float32)]),
    *[partial(tr.eigenpairs, KEY, SYMMETRIC, 4, **x) for x in ({"which": "max"}, {"num": 7})],
    lambda: tr.eigenpairs(KEY, SYMMETRIC, 4, start=jnp.ones(3)),
    lambda: twice(
        lambda x: tr.eigenpairs(KEY, lx.MatrixLinearOperator(x * jnp.eye(9), PSD), 4).values[0]
    ),
    lambda: tr.spectral_sum(KEY, np.exp, SYMMETRIC, 4),
    lambda: tr.spectral_sum(KEY, lambda x: x.astype(complex), SYMMETRIC, 4),
    *[partial(tr.spectral_sum, KEY, jnp.log, SYMMETRIC, 4, num_steps=q) for q in (2.0, 5)],
    lambda: tr.spectral_sum(KEY, jnp.log, SYMMETRIC, rtol=0.1, num_steps=5),
    lambda: tr.spectral_sum(KEY, lambda x: jnp.stack([x, x]), SYMMETRIC, 4),
    lambda: tr.spectral_sum(KEY, jnp.log, SYMMETRIC, 4, shifts=1j),
    lambda: curvature.hessian(lambda p: p @ p, ONES).mv(jnp.ones(3)),
    lambda: tr.schatten_norm(KEY, PLAIN, 4, "nuc"),
    lambda: twice(lambda t: tr.spectral_sum(KEY, jnp.log, t * POSITIVE, 4).value),
    lambda: jax.grad(lambda x: tr.spectral_diagonal(KEY, lambda y: x * y, LARGE, 8).value[0])(1.0),
    lambda: tr.spectral_density(KEY, SYMMETRIC, 4, jnp.ones(1)),
    lambda: tr.logdet(KEY, PLAIN, 4),
    lambda: tr.logdet(KEY, POSITIVE, 4, shifts=1.0, preconditioner=tr.NystromPreconditioner(2)),
    *[partial(tr.logdet, KEY, POSITIVE, 4, **options) for options in WRONG],
    lambda: tr.inverse_trace(KEY, POSITIVE, 4, preconditioner=built()),
    lambda: tr.NystromPreconditioner(rank=0),
    lambda: tr.logdet(KEY, FUNCTION, 4, preconditioner=tr.KernelPreconditioner()),
    lambda: tr.logdet(KEY, POSITIVE, atol=0.1, shifts=1.0),
    lambda: tr.logdet(KEY, LARGE, 4, preconditioner=built()),
    lambda: twice(lambda c: tr.logdet(KEY, c * POSITIVE, 4, preconditioner=built()).value),
    lambda: tr.gaussian_log_density(KEY, N * [1.0], POSITIVE, 4),
    lambda: tr.gaussian_log_density(KEY, ONES[:3], POSITIVE, 4),
    lambda: tr.gaussian_log_density(KEY, ONES.astype(complex), POSITIVE, 4),
    lambda: tr.gaussian_log_density(KEY, POSITIVE, ONES, 4),
    # Sequences.
    lambda: tr.Tracker("best"),
    lambda: tr.Tracker().update(KEY, LARGE, None),
    # Curvature.
    *[partial(hessian, params={"w": x}) for x in (3, np.ones(N, complex))],
    lambda: curvature.gauss_newton(lambda p: jnp.arange(3), jnp.sum, {"w": ONES}),
    lambda: curvature.gauss_newton(lambda p, x: p["w"] * x, lambda z: z, {"w": ONES}, ONES),
    *[partial(fisher, **options) for options in ({"key": KEY}, {"num_samples": 0})],
    lambda: fisher(lambda p, x: p["w"] * x[:, None]),
    lambda: fisher(sample=lambda key, p, x: x, key=KEY),
    # Sparse matrices.
    lambda: tr.SparseLinearOperator(EYE),
    *[partial(fn, np.ones(3)) for fn in (SPARSE.with_data, SPARSE.mv)],
    lambda: tr.SparseLinearOperator(jsparse.empty((2**31, 2))),
    # Kernels.
    lambda: KERNEL(min, (ONES, ONES[:3])),
    lambda: KERNEL(lambda x, y: x * y, ONES, block_size=0),
    lambda: KERNEL(lambda x, y: x * y, jnp.ones((3, N))),
    # Commands.
    *[command("trace", a=a) for a in (np.array([[None]]), np.ones((2, 3)))],
    command("trace", "--dtype", "float32", a=1j * np.eye(2)),
    command("logdet", a=np.tri(2)),
    command("density", a=np.eye(2) + 0j),
    command("logdet", "--plot", "a.png"),
    # The checks of an estimator.
    lambda: check_estimator(tr.HutchinsonEstimator(), k=10000),
    lambda: check_estimator(tr.XNysTraceEstimator(), operators=[PLAIN]),
    lambda: check_estimator(tr.HutchinsonEstimator(), keys=20, coverage=1.1),
]


def sites():
    """The lines of each `raise` and warning of the package, {(file, line): the first of them}."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            warns = isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
            raises = isinstance(node, ast.Raise) and node.exc is not None  # not what was caught
            if raises or warns:
                lines = range(node.lineno, node.end_lineno + 1)
                found |= {(name, line): (name, node.lineno) for line in lines}
    return found


def raised(call):
    """What this call raises, and the line of the package that did (else None)."""
    chain = AssertionError("nothing was raised")
    try:
        call()
    except Exception as error:
        chain = error
    while True:
        *_, frame = [None, *traceback.extract_tb(chain.__traceback__)]
        if frame and frame.filename.startswith(str(PACKAGE)):
            return chain, (str(Path(frame.filename).relative_to(PACKAGE)), frame.lineno)
        if chain.__context__ is None:
            return chain, None
        chain = chain.__context__


@cache
def outcomes():
    """What each call raises, and where."""
    return [raised(call) for call in CALLS]


SITES = sites()


def room(site):
    """The folder, or the file, of a line of the package."""
    return Path(site[0]).parts[0]


@pytest.mark.parametrize("name", sorted({room(site) for site in SITES}))
def test_every_message_is_reached(name):
    reached = {SITES.get(place) for _, place in outcomes()}
    assert {site for site in SITES.values() if room(site) == name and site not in reached} == set()


def test_every_message_is_a_sentence():
    """Or two, what and what instead; of a class that a user may catch, short, and on one line."""
    wrong = []
    for error, place in outcomes():
        text = str(error)
        sentence = text.endswith(".") and "  " not in text and "\n" not in text and len(text) < 500
        kinds = TypeError, ValueError, NotImplementedError, UserWarning, AssertionError
        if not (place in SITES and sentence and isinstance(error, kinds)):
            wrong.append(f"{place}: {type(error).__name__}: {text}")
    assert not wrong, "\n".join(wrong)


def test_outcomes():
    """The messages of `RESULTS` are sentences as well."""
    own = set(tr.RESULTS._name_to_item) - set(lx.RESULTS._name_to_item)
    assert own == set(_OUTCOMES) - {"successful"}
    for name in own:
        text = tr.RESULTS[getattr(tr.RESULTS, name)]
        assert text.count(". ") >= 1
        assert text.endswith(".")
