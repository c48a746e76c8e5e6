"""Every message of the package is reached by a call of the table, and is a sentence or two.

A `raise` or a warning in the package that no call reaches fails the test of its room.
"""

import argparse
import ast
import math
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse as ss
from jax.experimental import sparse as jsparse
from traceax._cli.common import check_exact, write
from traceax._cli.files import read_matrix

import traceax as tr
from traceax import curvature, plot
from traceax._cli import _parse
from traceax._estimators.solution import _OUTCOMES as solution_outcomes
from traceax._operators.sparse import _Entries
from traceax.testing import check_estimator

from ..helpers import PSD, by_products, register_tags

PACKAGE = Path(tr.__file__).parent
BUS = PACKAGE / "data" / "1138_bus.mtx"
N, KEY = 6, jax.random.key(0)
EYE, ONES = jnp.eye(N), jnp.ones(N)
SYMMETRIC = lx.MatrixLinearOperator(EYE, lx.symmetric_tag)
POSITIVE = lx.MatrixLinearOperator(EYE, PSD)
LARGE = lx.MatrixLinearOperator(jnp.eye(80), PSD)
HIDDEN = by_products(jnp.eye(80), PSD)  # what the default estimators cannot read
SMALLER = by_products(jnp.eye(70), PSD)
PLAIN = lx.MatrixLinearOperator(EYE)
COMPLEX = lx.MatrixLinearOperator(EYE.astype(complex))
FUNCTION = lx.FunctionLinearOperator(lambda v: v, jax.ShapeDtypeStruct((N,), float), PSD)
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


class Half(tr.AbstractTraceEstimator):
    """An estimator that returns less than it must."""

    kept: int = eqx.field(static=True)

    def compute(self, key, operator, k, weights):
        estimate, _ = tr.HutchinsonEstimator().compute(key, operator, k, weights)
        return (estimate, None) if self.kept == 2 else estimate


class Short(lx.AbstractLinearOperator):
    """An operator whose products have other sizes than it says."""

    shape: tuple[int, ...] = eqx.field(static=True)

    def mv(self, vector):
        return vector[:3]

    def as_matrix(self):
        raise NotImplementedError

    def transpose(self):
        return self

    def in_structure(self):
        return jax.ShapeDtypeStruct(self.shape, float)

    out_structure = in_structure


for ask in (lx.is_symmetric, lx.is_positive_semidefinite, lx.is_negative_semidefinite):
    ask.register(Short)(lambda operator: False)


def solution(value):
    return tr.Solution(value, jnp.abs(value), jnp.asarray(1), {}, tr.RESULTS.successful)


def command(*words, **files):
    """The command line, up to where it would print the message. `{}` is a folder with the files."""

    def call(folder):
        for name, array in files.items():
            np.save(folder / f"{name}.npy", array)
        arguments = _parse([word.format(folder) for word in words])
        arguments.run(arguments)

    return call


def reading(name, content, **options):
    """Reading such a file."""

    def call(folder):
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            np.save(path, content)
        read_matrix(path, **options)

    return call


def without_matplotlib(call):
    def missing(folder):
        with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
            call(folder)

    return missing


def full_disk(file):
    raise OSError("disk full")


def unwritable(folder):
    with mock.patch("os.access", return_value=False):
        command("diagonal", "a", "--output", "{}/a.npy")(folder)


def without_x64():
    """A call for an operator of float64, with 64-bit numbers switched off."""
    with jax.enable_x64(False):
        return tr.trace(jax.random.key(0), PLAIN, 4)


def tracking(k=8, operator=LARGE, state=None):
    def step(state):
        return tr.Tracker().update(state, KEY, operator, k)

    made = eqx.filter_eval_shape(lambda: tr.Tracker().init(LARGE, 8))
    return eqx.filter_eval_shape(step, made if state is None else state)


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


def objects():
    matrix = ss.csr_array(np.eye(2))
    matrix.data = np.array([None, None], object)
    return tr.SparseLinearOperator(matrix)


CALLS = [
    # The key, the operator, the budget.
    lambda _: tr.trace(0, PLAIN, 4),
    lambda _: tr.trace(jax.random.split(KEY, 3), PLAIN, 4),
    lambda _: tr.trace(KEY, lx.MatrixLinearOperator(jnp.zeros((0, 0))), 4),
    lambda _: tr.trace(KEY, EYE, 4),
    lambda _: tr.trace(KEY, Short((9,)), 4),
    lambda _: tr.trace(KEY, Short((9, 8)), 4),
    lambda _: tr.trace(KEY, lx.MatrixLinearOperator(EYE[:, :3]), 4),
    lambda _: tr.eigenvalue_count(KEY, POSITIVE, 3.0, 1, 4),
    lambda _: tr.trace(KEY, MIXED, 4),
    lambda _: tr.trace(KEY, Liar(), 4),
    lambda _: tr.trace(KEY, PLAIN * 1j, 4),
    lambda _: without_x64(),
    lambda _: jax.jit(lambda k: tr.trace(KEY, PLAIN, k).value)(4),
    lambda _: tr.trace(KEY, PLAIN, True),
    lambda _: tr.trace(KEY, PLAIN, 4.5),
    lambda _: tr.trace(KEY, PLAIN, 0),
    lambda _: tr.trace(KEY, PLAIN, 1, tr.XTraceEstimator()),
    # The estimator.
    lambda _: tr.trace(KEY, FUNCTION, 4, Half(1)),
    lambda _: jax.grad(lambda s: tr.trace(KEY, s * FUNCTION, 4, Half(2)).value)(1.0),
    lambda _: tr.trace(KEY, PLAIN, 4, tr.XTraceEstimator),
    lambda _: tr.trace(KEY, PLAIN, 4, "xtrace"),
    lambda _: tr.trace(KEY, LARGE, rtol=0.1, max_k=40, estimator=tr.ExactTraceEstimator()),
    lambda _: tr.trace(KEY, PLAIN, 4, tr.XNysTraceEstimator()),
    lambda _: tr.diagonal(KEY, HIDDEN, 4, Half(2)),
    lambda _: tr.HutchinsonEstimator(batch_size=0),
    lambda _: tr.XTraceEstimator(improved="yes"),
    lambda _: tr.XTraceEstimator(tr.RademacherSampler(), improved=True),
    lambda _: tr.trace(KEY, PLAIN, 4, tr.XTraceEstimator(tr.NormalSampler(complex))),
    lambda _: tr.trace(KEY, COMPLEX, 4, tr.XTraceEstimator(tr.NormalSampler(float), improved=True)),
    lambda _: tr.NormalSampler(int),
    lambda _: tr.RademacherSampler(bool),
    lambda _: tr.SteinhausSampler(float),
    # A tolerance in place of a budget.
    lambda _: tr.trace(KEY, PLAIN),
    lambda _: tr.trace(KEY, PLAIN, 4, rtol=0.1),
    lambda _: tr.trace(KEY, PLAIN, rtol="small"),
    lambda _: tr.trace(KEY, PLAIN, rtol=-1.0),
    lambda _: solution(jnp.ones(())).interval(95),
    # Functions of matrices.
    lambda _: tr.spectral_sum(KEY, jnp.log, PLAIN, 4, shifts=1.0),
    lambda _: tr.spectral_sum(KEY, jnp.abs, PLAIN, 4),
    lambda _: tr.spectral_sum(KEY, jnp.floor, PLAIN, 4),
    lambda _: twice(lambda t: tr.spectral_sum(KEY, jnp.exp, t * PLAIN, 4).value),
    lambda _: of(mode="jvp"),
    lambda _: of(predict=jnp.sum, mode="reverse"),
    lambda _: curvature.of(3),
    lambda _: of(wrt="params"),
    lambda _: of(lambda p: 1.0, True)(ONES),
    lambda _: of(lambda p: (1.0, 2))(ONES),
    lambda _: of(wrt=lambda *_: False)({"a": ONES}),
    lambda _: of(weights=len)(ONES),
    lambda _: curvature.hessian(lambda p, x: p @ x, ONES, batches=jnp.eye(N), weights=[1, 2]),
    lambda _: of(predict=jnp.sin)(ONES, np.ones(3)),
    lambda _: of(predict=lambda p: p)(ONES, (ONES,), ()),
    lambda _: of(groups=lambda path, x: 3)({"a": ONES}),
    lambda _: of(groups=lambda path, x: "all")([ONES, ONES.astype(jnp.float32)]),
    lambda _: of().ungroup(ONES, {}),
    lambda _: tr.eigenpairs(KEY, SYMMETRIC, 4, which="max"),
    lambda _: tr.eigenpairs(KEY, SYMMETRIC, 4, 7),
    lambda _: tr.eigenpairs(KEY, LARGE, 4, basis_size=2),
    lambda _: tr.eigenpairs(KEY, SYMMETRIC, 4, start=jnp.ones(3)),
    lambda _: twice(
        lambda x: tr.eigenpairs(KEY, lx.MatrixLinearOperator(x * jnp.eye(9), PSD), 4).values[0]
    ),
    lambda _: tr.spectral_sum(KEY, jnp.log, SYMMETRIC, 4, num_steps=2.0),
    lambda _: tr.spectral_sum(KEY, jnp.log, SYMMETRIC, 4, num_steps=5),
    lambda _: tr.spectral_sum(KEY, SYMMETRIC, jnp.log, 4),
    lambda _: tr.spectral_sum(KEY, lambda x: x.astype(complex), SYMMETRIC, 4),
    lambda _: tr.spectral_sum(KEY, lambda x: jnp.stack([x, x]), SYMMETRIC, 4),
    lambda _: tr.spectral_sum(KEY, jnp.log, SYMMETRIC, 4, shifts=1j),
    lambda _: curvature.hessian(lambda p: p @ p, ONES).mv(jnp.ones(3)),
    lambda _: tr.schatten_norm(KEY, PLAIN, 4, "nuc"),
    lambda _: tr.schatten_norm(KEY, PLAIN, 4, math.inf),
    lambda _: twice(
        lambda t: tr.spectral_sum(KEY, jnp.log, t * POSITIVE, 4, shifts=jnp.ones(2)).value.sum()
    ),
    lambda _: twice(jax.grad(lambda t: tr.spectral_sum(KEY, jnp.log, t * POSITIVE, 4).value)),
    lambda _: twice(lambda t: tr.spectral_diagonal(KEY, jnp.log, t * POSITIVE, 8).value.sum()),
    lambda _: tr.spectral_density(KEY, SYMMETRIC, 4, jnp.ones(1)),
    lambda _: tr.logdet(KEY, PLAIN, 4),
    lambda _: tr.logdet(KEY, POSITIVE, atol=0.1, shifts=1.0),
    lambda _: tr.logdet(KEY, POSITIVE, 4, shifts=[]),
    lambda _: tr.logdet(KEY, POSITIVE, 4, max_k=9),
    lambda _: tr.logdet(KEY, POSITIVE, 4, shifts=1.0, preconditioner=tr.NystromPreconditioner(2)),
    lambda _: plot.shifts(ONES[:2], solution(ONES)),
    lambda _: tr.logdet(KEY, POSITIVE, 4, fallback="cholesky"),
    lambda _: tr.logdet(KEY, POSITIVE, 4, preconditioner="none"),
    lambda _: tr.logdet(KEY, LARGE, atol=0.1, preconditioner=None),
    lambda _: tr.logdet(KEY, LARGE, atol=0.1, max_k=2),
    lambda _: tr.NystromPreconditioner(rank=0),
    lambda _: tr.logdet(
        KEY, POSITIVE, 4, preconditioner=tr.RPCholeskyPreconditioner(diagonal=ONES[:3])
    ),
    lambda _: tr.logdet(KEY, FUNCTION, 4, preconditioner=tr.RPCholeskyPreconditioner()),
    lambda _: tr.gaussian_log_density(KEY, POSITIVE, ONES, 4),
    lambda _: tr.gaussian_log_density(KEY, [1.0] * N, POSITIVE, 4),
    lambda _: built(tr.NystromPreconditioner()),
    lambda _: tr.logdet(KEY, LARGE, 4, preconditioner=built()),
    lambda _: jax.hessian(lambda c: tr.logdet(KEY, c * POSITIVE, 4, preconditioner=built()).value)(
        1.0
    ),
    lambda _: tr.gaussian_log_density(KEY, ONES[:3], POSITIVE, 4),
    lambda _: tr.gaussian_log_density(KEY, ONES.astype(complex), POSITIVE, 4),
    # Sequences.
    lambda _: tr.Tracker("best"),
    lambda _: tr.Tracker(sampler=tr.SphereSampler),
    lambda _: tracking(k=9),
    lambda _: tracking(operator=SMALLER),
    # Curvature.
    lambda _: hessian(params={"n": 3}),
    lambda _: hessian(params={"w": ONES.astype(complex)}),
    lambda _: hessian(batches=("text",)),
    lambda _: hessian(batches=(ONES, ONES[:3])),
    lambda _: hessian(lambda p: p["w"]),
    lambda _: curvature.jacobian_gram(lambda p: jnp.arange(3), {"w": ONES}).mv({"w": ONES}),
    lambda _: fisher(key=KEY),
    lambda _: fisher(num_samples=0),
    lambda _: fisher(lambda p, x: p["w"] * x[:, None]),
    lambda _: fisher(sample=lambda key, p, x: x, key=KEY),
    # Sparse matrices.
    lambda _: objects(),
    lambda _: tr.SparseLinearOperator(ss.coo_array(ONES)),
    lambda _: jax.jit(lambda m: tr.SparseLinearOperator(m).data)(jsparse.BCOO.fromdense(EYE)),
    lambda _: tr.SparseLinearOperator(jsparse.BCOO.fromdense(EYE, n_batch=1)),
    lambda _: tr.SparseLinearOperator(EYE),
    lambda _: SPARSE.with_data(ONES[:3]),
    lambda _: tr.SparseLinearOperator(_Entries(SPARSE.data, SPARSE.pattern)),
    lambda _: SPARSE.mv(ONES[:3]),
    lambda _: SPARSE.pattern.transpose(),
    lambda _: tr.SparseLinearOperator(jsparse.empty((2**31, 2))),
    lambda _: tr.SparseLinearOperator(
        jsparse.BCOO((jnp.ones(1), jnp.array([[-1, 0]])), shape=(2, 2))
    ),
    # Kernels.
    lambda _: KERNEL(EYE, ONES),
    lambda _: KERNEL(min, (ONES, ONES[:3])),
    lambda _: KERNEL(lambda x, y: x * y, ONES, block_size=0),
    lambda _: KERNEL(lambda x, y: x * y, jnp.ones((3, N))),
    # Pictures.
    without_matplotlib(lambda _: plot.interval({"a": solution(jnp.ones(()))})),
    lambda _: plot.convergence([]),
    lambda _: plot.convergence([3]),
    lambda _: plot.convergence([solution(ONES)]),
    lambda _: plot.spectral_density(ONES[:3], solution(ONES)),
    lambda _: plot.traces(ONES[:2], [3]),
    lambda _: plot.traces(ONES[:2], [solution(jnp.ones(()))]),
    lambda _: plot.traces(ONES[:2], solution(jnp.ones((2, 3)))),
    lambda _: plot.sharpness(ONES[:1], [3], 0.1),
    lambda _: plot.sharpness(ONES[:2], [], 0.1),
    # Files.
    reading("a.csv", b"1"),
    reading("a.npy", None),
    lambda f: (f / "a.npz").mkdir() or read_matrix(f / "a.npz"),
    reading("a.mtx", b""),
    reading("a.npy", np.array([["a"]])),
    reading("a.npy", np.eye(2), dtype="int32"),
    reading("a.npy", np.eye(2) + 0j, dtype=float),
    reading("a.npy", np.ones(3)),
    reading("a.npy", np.ones((2, 3))),
    reading("a.npy", np.ones((0, 0))),
    reading("a.npy", np.array([[1.0, 1.0], [0.0, 1.0]]), hermitian=True),
    # Commands.
    command("trace", "a", "-k", "0"),
    command("logdet", "a", "--shift", "inf"),
    command("logdet", "a", "--rtol=-1"),
    command("logdet", "{}/a.npy", "--shift", "2", "--shifts", "1,2", a=EYE),
    command("logdet", "{}/a.npy", "--plot", "a.png", a=EYE),
    command("logdet", "a", "--max-k", "9"),
    command("logdet", "a", "-k", "9", "--rtol", "1"),
    command("diagonal", "a", "--output", "a.mat"),
    lambda f: (f / "b.npy").mkdir() or command("diagonal", "a", "--output", "{}/b.npy")(f),
    command("diagonal", "a", "--output", "{}/none/a.npy"),
    unwritable,
    lambda f: write(f / "a", full_disk),
    command("density", "a", "--width", "-1"),
    command("density", "a", "--range", "2", "1"),
    command("density", "a", "--points", "1"),
    without_matplotlib(command("density", "a", "--plot", "{}/a.png")),
    command("trace", "{}/a.npy", "--function", "log", a=np.eye(2) + 0j),
    command("trace", "a", "-k", "9"),
    lambda _: check_exact(
        argparse.Namespace(exact=True),
        lx.IdentityLinearOperator(jax.ShapeDtypeStruct((20000,), float)),
    ),
    command("spectral-sum", "a"),
    command("diagonal", "{}/a.npy", "--function", "exp", "--rtol", "1", a=EYE),
    # The checks of an estimator.
    lambda _: check_estimator(tr.HutchinsonEstimator(), k=10000),
    lambda _: check_estimator(tr.XNysTraceEstimator(), operators=[PLAIN]),
    lambda _: check_estimator(tr.XTraceEstimator),
    lambda _: check_estimator(tr.HutchinsonEstimator(), keys=20, coverage=1.1),
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


def raised(call, folder):
    """What this call raises, and the line of the package that did (else None)."""
    chain = AssertionError("nothing was raised")
    try:
        call(folder)
    except BaseException as error:  # SystemExit: argparse ends the program with the message
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
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, str(i)) for i in range(len(CALLS))]
        for made in folders:
            made.mkdir()
        return [raised(*pair) for pair in zip(CALLS, folders, strict=True)]


SITES = sites()


def room(site):
    """The folder, or the file, of a line of the package."""
    return Path(site[0]).parts[0]


@pytest.mark.parametrize("name", sorted({room(site) for site in SITES}))
def test_every_message_is_reached(name):
    reached = {SITES.get(place) for _, place in outcomes()}
    assert {site for site in SITES.values() if room(site) == name and site not in reached} == set()


def test_every_message_is_a_sentence():
    """Of a class that a user may catch, short, and on one line."""
    wrong = []
    for error, place in outcomes():
        text = str(error)
        sentence = text.endswith(".") or isinstance(error, argparse.ArgumentTypeError)
        short = "  " not in text and "\n" not in text and len(text) < 500
        kinds = TypeError, ValueError, NotImplementedError, ImportError, UserWarning
        caught = isinstance(error, (*kinds, AssertionError, argparse.ArgumentTypeError))
        if not (place in SITES and sentence and short and caught):
            wrong.append(f"{place}: {type(error).__name__}: {text}")
    assert not wrong, "\n".join(wrong)


def test_outcomes():
    """The messages of `RESULTS` are sentences as well."""
    own = set(tr.RESULTS._name_to_item) - set(lx.RESULTS._name_to_item)
    assert own == set(solution_outcomes) - {"successful"}
    for name in own:
        text = tr.RESULTS[getattr(tr.RESULTS, name)]
        assert text.count(". ") >= 1
        assert text.endswith(".")
