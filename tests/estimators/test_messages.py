"""Every message of the package in one table: what happened, with which value, and what to do.

A `raise` or a warning in the package that no row of the table reaches fails the test.
"""

import ast
import math
import traceback
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse as ss
from jax.experimental import sparse as jsparse

import traceax as tr
import traceax.extend as tre
from traceax import curvature
from traceax._cli import _parser, _run
from traceax.testing import check_estimator

from ..helpers import PSD, by_products, register_tags

PACKAGE = Path(tr.__file__).parent
N, KEY = 6, jax.random.key(0)
EYE, ONES = jnp.eye(N), jnp.ones(N)
SYMMETRIC = lx.MatrixLinearOperator(EYE, lx.symmetric_tag)
POSITIVE = lx.MatrixLinearOperator(EYE, PSD)
LARGE = lx.MatrixLinearOperator(jnp.eye(80), PSD)
HIDDEN = by_products(jnp.eye(80), PSD)  # what the default estimators cannot read
HIDDEN_COMPLEX = by_products(jnp.eye(80, dtype=jnp.complex64), PSD)
OTHER_KEY = jax.random.key(0, impl="rbg")
PLAIN_ONE = tr.HutchinsonEstimator()
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


class Own(tr.AbstractTraceEstimator):
    """An estimator from one method."""

    def compute(self, key, operator, k):
        return tr.HutchinsonEstimator().compute(key, operator, k)


class Half(tr.AbstractTraceEstimator):
    """An estimator that returns less than it must."""

    kept: int = eqx.field(static=True)

    def compute(self, key, operator, k):
        estimate, _ = tr.HutchinsonEstimator().compute(key, operator, k)
        return (estimate, None) if self.kept == 2 else estimate


class Factors(tre.AbstractPreconditioner):
    """A preconditioner that returns its factors alone."""

    rank: int | None = eqx.field(default=2, static=True)

    def check(self, operator):
        pass

    def of_rank(self, key, operator, rank):
        return tr.NystromPreconditioner().of_rank(key, operator, rank).factors


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


def command(*words, a=EYE):
    """The command line, up to where it would print the message, for a file with this array."""

    def call(folder):
        np.save(folder / "a.npy", a)
        _run(_parser().parse_args([words[0], str(folder / "a.npy"), *words[1:]]))

    return call


def run_state(**options):
    """The abstract state of a run to a tolerance: nothing is compiled."""
    return eqx.filter_eval_shape(
        lambda: tr.trace(KEY, HIDDEN, rtol=0.1, max_k=40, keep_state=True, **options).state
    )


def going_on_from_many():
    """A tolerance run that goes on from several states at once."""
    return eqx.filter_eval_shape(
        lambda state: tr.trace(KEY, HIDDEN, rtol=0.1, max_k=40, state=state),
        eqx.filter_eval_shape(lambda x: jax.tree.map(lambda x: x[None], x), run_state()),
    )


def without_x64():
    """A call for an operator of float64, with 64-bit numbers switched off."""
    with jax.enable_x64(False):
        return tr.trace(jax.random.key(0), PLAIN, 4)


def going_on(operator, max_k, key=KEY, **options):
    return eqx.filter_eval_shape(
        lambda state: tr.trace(key, operator, rtol=0.1, max_k=max_k, state=state, **options),
        run_state(**options),
    )


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


def derivative(t):
    return tr.logdet_directional_derivative(
        KEY, lambda s: lx.MatrixLinearOperator(s * EYE, PSD), (t,), (1.0,), 4
    ).value


# Kind; words on the value that was given; words on what to do; the call.
MESSAGES = [
    # The key, the operator, the budget.
    (TypeError, "got int", "`jax.random.key(0)`", lambda _: tr.trace(0, PLAIN, 4)),
    (
        TypeError,
        "shape (3,)",
        "use `jax.vmap`",
        lambda _: tr.trace(jax.random.split(KEY, 3), PLAIN, 4),
    ),
    (
        ValueError,
        "shape=(0,)",
        "Check what",
        lambda _: tr.trace(KEY, lx.MatrixLinearOperator(jnp.zeros((0, 0))), 4),
    ),
    (TypeError, "shape (6, 6)", "wrap a matrix in", lambda _: tr.trace(KEY, EYE, 4)),
    (
        ValueError,
        "has 3 numbers",
        "what `out_structure`",
        lambda _: tr.trace(KEY, Short((9,)), 4),
    ),
    (ValueError, "24 numbers", "what `out_structure`", lambda _: tr.trace(KEY, Short((9, 8)), 4)),
    (
        ValueError,
        "got 6 x 3",
        "the trace of `A.T @ A`",
        lambda _: tr.trace(KEY, lx.MatrixLinearOperator(EYE[:, :3]), 4),
    ),
    (
        ValueError,
        "got a=3.0 and b=1",
        "smaller end first",
        lambda _: tr.eigenvalue_count(KEY, POSITIVE, 3.0, 1, 4),
    ),
    (ValueError, "complex128", "Declare its whole", lambda _: tr.trace(KEY, MIXED, 4)),
    (ValueError, "is complex", "Declare its whole", lambda _: tr.trace(KEY, Liar(), 4)),
    (ValueError, "number 1j", "Make the operator complex", lambda _: tr.trace(KEY, PLAIN * 1j, 4)),
    (ValueError, "float64", "where the operator was made", lambda _: without_x64()),
    (
        TypeError,
        "the traced value",
        "static_argnames",
        lambda _: jax.jit(lambda k: tr.trace(KEY, PLAIN, k).value)(4),
    ),
    (TypeError, "the bool True", "k=100", lambda _: tr.trace(KEY, PLAIN, True)),
    (TypeError, "4.5 of type float", "`int(k)`", lambda _: tr.trace(KEY, PLAIN, 4.5)),
    (ValueError, "got 0", "at least 1", lambda _: tr.trace(KEY, PLAIN, 0)),
    (
        UserWarning,
        "got k=1",
        "raised to 2",
        lambda _: tr.trace(KEY, PLAIN, 1, tr.XTraceEstimator()),
    ),
    # The estimator.
    (TypeError, "got a Estimate", "(u, v))`", lambda _: tr.trace(KEY, FUNCTION, 4, Half(1))),
    (
        TypeError,
        "None as the weights",
        "`lax.stop_gradient`",
        lambda _: jax.grad(lambda s: tr.trace(KEY, s * FUNCTION, 4, Half(2)).value)(1.0),
    ),
    (
        TypeError,
        "got the class XTraceEstimator",
        "an instance of an AbstractTraceEstimator",
        lambda _: tr.trace(KEY, PLAIN, 4, tr.XTraceEstimator),
    ),
    (
        TypeError,
        "got XDiagEstimator()",
        "such as `traceax.XTraceEstimator()`",
        lambda _: tr.trace(KEY, PLAIN, 4, tr.XDiagEstimator()),
    ),
    (
        TypeError,
        "got 'xtrace'",
        "such as `traceax.XTraceEstimator()`",
        lambda _: tr.trace(KEY, PLAIN, 4, "xtrace"),
    ),
    (
        ValueError,
        "ExactTraceEstimator",
        "a budget k, or use XTraceEstimator()",
        lambda _: tr.trace(KEY, LARGE, rtol=0.1, max_k=40, estimator=tr.ExactTraceEstimator()),
    ),
    (
        ValueError,
        "ExactDiagonalEstimator",
        "a budget k, or use XDiagEstimator()",
        lambda _: tr.diagonal(
            KEY, LARGE, rtol=0.1, max_k=40, estimator=tr.ExactDiagonalEstimator()
        ),
    ),
    (
        ValueError,
        "MatrixLinearOperator",
        "use XTraceEstimator",
        lambda _: tr.trace(KEY, PLAIN, 4, tr.XNysTraceEstimator()),
    ),
    (ValueError, "got 0", "of at least 1", lambda _: tr.HutchinsonEstimator(batch_size=0)),
    (ValueError, "got 'yes'", "True, False or None", lambda _: tr.XTraceEstimator(improved="yes")),
    (
        ValueError,
        "RademacherSampler",
        "Use SphereSampler()",
        lambda _: tr.XTraceEstimator(tr.RademacherSampler(), improved=True),
    ),
    (
        ValueError,
        "complex128 probes",
        "without a dtype",
        lambda _: tr.trace(KEY, PLAIN, 4, tr.XTraceEstimator(tr.NormalSampler(complex))),
    ),
    (
        ValueError,
        "real (float64) probes",
        "improved=False",
        lambda _: tr.trace(
            KEY, COMPLEX, 4, tr.XTraceEstimator(tr.NormalSampler(float), improved=True)
        ),
    ),
    (ValueError, "got int64", "Leave the dtype out", lambda _: tr.NormalSampler(int)),
    (ValueError, "got bool", "Leave the dtype out", lambda _: tr.RademacherSampler(bool)),
    (ValueError, "float64", "Use RademacherSampler", lambda _: tr.SteinhausSampler(float)),
    # A tolerance in place of a budget.
    (TypeError, "got None", "rtol=1e-3", lambda _: tr.trace(KEY, PLAIN)),
    (TypeError, "k=4", "pass max_k", lambda _: tr.trace(KEY, PLAIN, 4, rtol=0.1)),
    (TypeError, "got 'small'", "a real number", lambda _: tr.trace(KEY, PLAIN, rtol="small")),
    (ValueError, "got -1.0", "finite and not negative", lambda _: tr.trace(KEY, PLAIN, rtol=-1.0)),
    (TypeError, "got 3", "keep_state=True", lambda _: tr.trace(KEY, PLAIN, rtol=0.1, state=3)),
    (ValueError, "80 rows", "with 70 rows", lambda _: going_on(SMALLER, 40)),
    (ValueError, "got 20", "at least 39", lambda _: going_on(HIDDEN, 20)),
    (ValueError, "rows of float", "rows of complex64", lambda _: going_on(HIDDEN_COMPLEX, 40)),
    (ValueError, "below n=80", "give a max_k", lambda _: going_on(HIDDEN, 80, estimator=PLAIN_ONE)),
    (ValueError, "of rbg", "impl='threefry2x32'", lambda _: going_on(HIDDEN, 40, key=OTHER_KEY)),
    (ValueError, "stack of states, of shape (1,)", "or take one", lambda _: going_on_from_many()),
    (TypeError, "got 2.5", "give an int", lambda _: tr.trace(KEY, PLAIN, 2.5, max_k=4)),
    (ValueError, "got 5", "at most max_k = 4", lambda _: tr.trace(KEY, PLAIN, 5, max_k=4)),
    (
        ValueError,
        "Own has no `extendable`",
        "give k without max_k",
        lambda _: tr.trace(KEY, HIDDEN, 20, Own(), max_k=40),
    ),
    (ValueError, "got 95", "0.95", lambda _: solution(jnp.ones(())).interval(95)),
    # Functions of matrices.
    (
        ValueError,
        "MatrixLinearOperator",
        "lineax.symmetric_tag",
        lambda _: tr.spectral_sum(KEY, jnp.log, PLAIN, 4, shifts=1.0),
    ),
    (
        TypeError,
        "got float64",
        "a holomorphic function",
        lambda _: tr.spectral_sum(KEY, jnp.abs, PLAIN, 4),
    ),
    (
        TypeError,
        "floor",
        "takes complex numbers",
        lambda _: tr.spectral_sum(KEY, jnp.floor, PLAIN, 4),
    ),
    (ValueError, "got 'jvp'", "must be one of", lambda _: of(mode="jvp")),
    (ValueError, "got mode='reverse'", "Leave out", lambda _: of(predict=jnp.sum, mode="reverse")),
    (ValueError, "got 1.0", "has_aux=False", lambda _: of(lambda p: 1.0, True)(ONES)),
    (ValueError, "got (1.0, 2)", "has_aux=True", lambda _: of(lambda p: (1.0, 2))(ONES)),
    (ValueError, "leaves ['a']", "Return True", lambda _: of(wrt=lambda *_: False)({"a": ONES})),
    (ValueError, "for no batches", "in the loss", lambda _: of()(ONES, weights=[1.0])),
    (
        ValueError,
        "got shape (2,)",
        "in the loss",
        lambda _: curvature.hessian(lambda p, x: p @ x, ONES, batches=jnp.eye(N), weights=[1, 2]),
    ),
    (TypeError, "got ['ndarray']", "two tuples", lambda _: of(predict=jnp.sin)(ONES, np.ones(3))),
    (ValueError, "got 3", "a name", lambda _: of(groups=lambda path, x: 3)({"a": ONES})),
    (
        ValueError,
        "['float32', 'float64']",
        "each dtype",
        lambda _: of(groups=lambda path, x: "all")([ONES, ONES.astype(jnp.float32)]),
    ),
    (ValueError, "groups=None", "already", lambda _: of().ungroup(ONES, {})),
    (
        ValueError,
        "got 'max'",
        "'LA', 'SA'",
        lambda _: tr.eigenpairs(KEY, SYMMETRIC, 4, which="max"),
    ),
    (ValueError, "num=7", "num <= 6", lambda _: tr.eigenpairs(KEY, SYMMETRIC, 4, 7)),
    (
        ValueError,
        "got shapes [(3,)]",
        "Leave it out",
        lambda _: tr.eigenpairs(KEY, SYMMETRIC, 4, start=jnp.ones(3)),
    ),
    (
        NotImplementedError,
        "first derivative only",
        "finite differences",
        lambda _: twice(
            lambda x: tr.eigenpairs(KEY, lx.MatrixLinearOperator(x * jnp.eye(9), PSD), 4).values[0]
        ),
    ),
    (
        ValueError,
        "got 2.0",
        "of at least 1, or None",
        lambda _: tr.spectral_sum(KEY, jnp.log, SYMMETRIC, 4, num_steps=2.0),
    ),
    (
        ValueError,
        "got 5",
        "at most the budget k=4",
        lambda _: tr.spectral_sum(KEY, jnp.log, SYMMETRIC, 4, num_steps=5),
    ),
    (
        TypeError,
        "got a MatrixLinearOperator",
        "The order is",
        lambda _: tr.spectral_sum(KEY, SYMMETRIC, jnp.log, 4),
    ),
    (
        TypeError,
        "got complex128",
        "one at a time",
        lambda _: tr.spectral_sum(KEY, lambda x: x.astype(complex), SYMMETRIC, 4),
    ),
    (
        ValueError,
        "got shape (2,)",
        "one call for each",
        lambda _: tr.spectral_sum(KEY, lambda x: jnp.stack([x, x]), SYMMETRIC, 4),
    ),
    (
        TypeError,
        "got an array of complex",
        "take the real part",
        lambda _: tr.spectral_sum(KEY, jnp.log, SYMMETRIC, 4, shifts=1j),
    ),
    (
        ValueError,
        "[6] got ",
        "a vector like the parameters",
        lambda _: curvature.hessian(lambda p: p @ p, ONES).mv(jnp.ones(3)),
    ),
    (
        TypeError,
        "got str",
        "Give 1 for",
        lambda _: tr.schatten_norm(KEY, PLAIN, 4, "nuc"),  # pyright: ignore[reportArgumentType]
    ),
    (
        ValueError,
        "got inf",
        "`traceax.eigenpairs`",
        lambda _: tr.schatten_norm(KEY, PLAIN, 4, math.inf),
    ),
    (
        ValueError,
        "shape (1,)",
        "give the `width`",
        lambda _: tr.spectral_density(KEY, SYMMETRIC, 4, jnp.ones(1)),
    ),
    (
        ValueError,
        "MatrixLinearOperator",
        "lineax.positive_semidefinite_tag",
        lambda _: tr.logdet(KEY, PLAIN, 4),
    ),
    (
        ValueError,
        "not available yet, got atol=0.1",
        "Give a budget k",
        lambda _: tr.logdet(KEY, POSITIVE, atol=0.1),  # pyright: ignore[reportArgumentType]
    ),
    (
        ValueError,
        "shape (0,)",
        "give one number at least",
        lambda _: tr.logdet(KEY, POSITIVE, 4, shifts=[]),
    ),
    (
        ValueError,
        "got NystromPreconditioner",
        "leave `preconditioner` out",
        lambda _: tr.logdet(
            KEY, POSITIVE, 4, shifts=1.0, preconditioner=tr.NystromPreconditioner(2)
        ),
    ),
    (
        ValueError,
        "got 'cholesky'",
        "must be 'exact'",
        lambda _: tr.logdet(KEY, POSITIVE, 4, fallback="cholesky"),
    ),
    (
        TypeError,
        "got 'none'",
        "'auto', None, or",
        lambda _: tr.logdet(KEY, POSITIVE, 4, preconditioner="none"),
    ),
    (ValueError, "got 0", "of at least 1", lambda _: tr.NystromPreconditioner(rank=0)),
    (
        ValueError,
        "shape (3,)",
        "of shape (6,)",
        lambda _: tr.logdet(
            KEY, POSITIVE, 4, preconditioner=tr.RPCholeskyPreconditioner(diagonal=ONES[:3])
        ),
    ),
    (
        ValueError,
        "FunctionLinearOperator",
        "or use NystromPreconditioner()",
        lambda _: tr.logdet(KEY, FUNCTION, 4, preconditioner=tr.RPCholeskyPreconditioner()),
    ),
    (
        TypeError,
        "got a LowRankPlusIdentity",
        "Return `traceax.extend.BuiltPreconditioner(",
        lambda _: tr.logdet(KEY, LARGE, 12, preconditioner=Factors()),
    ),
    (
        TypeError,
        "got a MatrixLinearOperator",
        "The order is `gaussian_log_density(key, y,",
        lambda _: tr.gaussian_log_density(KEY, POSITIVE, ONES, 4),
    ),
    (
        TypeError,
        "got a list",
        "`jax.numpy.asarray(y)`",
        lambda _: tr.gaussian_log_density(KEY, [1.0] * N, POSITIVE, 4),
    ),
    (ValueError, "without a budget", "(rank=100)", lambda _: built(tr.NystromPreconditioner())),
    (
        ValueError,
        "but this",
        "Build one for it",
        lambda _: tr.logdet(KEY, LARGE, 4, preconditioner=built()),
    ),
    (
        TypeError,
        "built before",
        "Say how to build one",
        lambda _: tr.inverse_trace(KEY, POSITIVE, 4, preconditioner=built()),  # pyright: ignore[reportArgumentType]
    ),
    (
        NotImplementedError,
        "built before",
        "those of the default mode",
        lambda _: jax.hessian(
            lambda c: tr.logdet(KEY, c * POSITIVE, 4, preconditioner=built()).value
        )(1.0),
    ),
    (
        ValueError,
        "shape is (3,)",
        "pass `y.T`",
        lambda _: tr.gaussian_log_density(KEY, ONES[:3], POSITIVE, 4),
    ),
    (
        ValueError,
        "the operator is real (float64)",
        "pass `y.real`",
        lambda _: tr.gaussian_log_density(KEY, ONES.astype(complex), POSITIVE, 4),
    ),
    # Sequences.
    (ValueError, "got 'best'", "one of ['recycled'", lambda _: tr.Tracker("best")),
    (TypeError, "got None", "`tracker.init(", lambda _: tr.Tracker().update(KEY, LARGE, None)),
    # Curvature.
    (ValueError, "types ['int']", "jnp.asarray(1.0)", lambda _: hessian(params={"n": 3})),
    (
        ValueError,
        "complex128",
        "real and imaginary",
        lambda _: hessian(params={"w": ONES.astype(complex)}),
    ),
    (ValueError, "shapes [(6,), (3,)]", "Reshape", lambda _: hessian(batches=(ONES, ONES[:3]))),
    (ValueError, "f64[6]", "`jnp.mean(...)`", lambda _: hessian(lambda p: p["w"])),
    (
        ValueError,
        "i64[3]",
        "`.astype(float)`",
        lambda _: curvature.jacobian_gram(lambda p: jnp.arange(3), {"w": ONES}).mv({"w": ONES}),
    ),
    (ValueError, "sample of type NoneType", "needs both", lambda _: fisher(key=KEY)),
    (ValueError, "got 0", "of at least 1", lambda _: fisher(num_samples=0)),
    (ValueError, "(6, 1)", "Do not sum", lambda _: fisher(lambda p, x: p["w"] * x[:, None])),
    (
        ValueError,
        "got PyTreeDef(*)",
        "a tuple of 1",
        lambda _: fisher(sample=lambda key, p, x: x, key=KEY),
    ),
    # Sparse matrices.
    (ValueError, "shape (6,)", "Reshape", lambda _: tr.SparseLinearOperator(ss.coo_array(ONES))),
    (
        ValueError,
        "traced",
        "`operator.with_data(data)`",
        lambda _: jax.jit(lambda m: tr.SparseLinearOperator(m).data)(jsparse.BCOO.fromdense(EYE)),
    ),
    (
        ValueError,
        "n_batch=1",
        "Convert it",
        lambda _: tr.SparseLinearOperator(jsparse.BCOO.fromdense(EYE, n_batch=1)),
    ),
    (TypeError, "got ArrayImpl", "Wrap a dense", lambda _: tr.SparseLinearOperator(EYE)),
    (ValueError, "shape (3,)", "one number for each", lambda _: SPARSE.with_data(ONES[:3])),
    (ValueError, "got (3,)", "`jax.vmap(", lambda _: SPARSE.mv(ONES[:3])),
    (
        ValueError,
        "(2147483648, 2)",
        "into blocks",
        lambda _: tr.SparseLinearOperator(jsparse.empty((2**31, 2))),
    ),
    (
        ValueError,
        "got -1",
        "Add the size",
        lambda _: tr.SparseLinearOperator(
            jsparse.BCOO((jnp.ones(1), jnp.array([[-1, 0]])), shape=(2, 2))
        ),
    ),
    # Kernels.
    (TypeError, "got a ArrayImpl", "`lineax.MatrixLinearOperator(", lambda _: KERNEL(EYE, ONES)),
    (ValueError, "shapes [(6,), (3,)]", "shape (n,)", lambda _: KERNEL(min, (ONES, ONES[:3]))),
    (ValueError, "got 0", "or None", lambda _: KERNEL(lambda x, y: x * y, ONES, block_size=0)),
    (
        ValueError,
        "got (6,)",
        "`batched=True`",
        lambda _: KERNEL(lambda x, y: x * y, jnp.ones((3, N))),
    ),
    # Commands.
    (ValueError, "allow_pickle", "(.mtx", command("trace", a=np.array([[None]]))),
    (ValueError, "shape (2, 3)", "a square matrix", command("trace", a=np.ones((2, 3)))),
    (
        ValueError,
        "are complex",
        "--dtype complex64",
        command("trace", "--dtype", "float32", a=1j * np.eye(2)),
    ),
    (ValueError, "not symmetric", "(A + A^H) / 2", command("logdet", a=np.tri(2))),
    (ValueError, "complex", "--psd", command("density", a=np.eye(2) + 0j)),
    (ValueError, "--plot", "Add --shifts", command("logdet", "--output", "a.txt")),
    # The checks of an estimator.
    (
        ValueError,
        "XNysTraceEstimator accepts none",
        "`check_estimator(estimator, operators=[...])`",
        lambda _: check_estimator(tr.XNysTraceEstimator(), operators=[PLAIN]),
    ),
    (
        ValueError,
        "k=10000",
        "Give larger operators",
        lambda _: check_estimator(tr.HutchinsonEstimator(), k=10000),
    ),
    (
        TypeError,
        "the class XTraceEstimator",
        "such as `traceax.XTraceEstimator()`",
        lambda _: check_estimator(tr.XTraceEstimator),
    ),
    (
        AssertionError,
        "HutchinsonEstimator: 95 % intervals",
        "not 110%",
        lambda _: check_estimator(tr.HutchinsonEstimator(), keys=20, coverage=1.1),
    ),
]


def sites():
    """The lines of each `raise` and warning of the package: {(file, line): the first of them}."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            warns = isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
            raises = isinstance(node, ast.Raise) and node.exc is not None  # not what was caught
            if raises or warns:
                lines = range(node.lineno, node.end_lineno + 1)
                found |= {(str(path), line): (path.name, node.lineno) for line in lines}
    return found


def raised(call, folder):
    """What this call raises, and the line of the package that did (else None)."""
    chain = AssertionError("nothing was raised")
    try:
        call(folder)
    except Exception as error:
        chain = error
    while True:
        *_, frame = [None, *traceback.extract_tb(chain.__traceback__)]
        if frame and frame.filename.startswith(str(PACKAGE)):
            return chain, (frame.filename, frame.lineno)
        if chain.__context__ is None:
            return chain, None
        chain = chain.__context__


def test_every_message(tmp_path, capsys):
    """Each is reached, is of its kind, names the value and the remedy, and is a sentence."""
    places, reached, wrong = sites(), set(), []
    for i, (kind, value, remedy, call) in enumerate(MESSAGES):
        folder = tmp_path / str(i)
        folder.mkdir()
        error, place = raised(call, folder)
        text = str(error)
        sentence = text.endswith(".") and "  " not in text and "\n" not in text and len(text) < 500
        if (
            place in places
            and type(error) is kind
            and value in text
            and remedy in text
            and sentence
        ):
            reached.add(places[place])
        else:
            wrong.append(f"{value!r}, {remedy!r}, {place}: {type(error).__name__}: {text}")
    assert not wrong, "\n".join(wrong)
    assert reached == set(places.values())


def test_outcomes():
    """The messages of `RESULTS` say what was found, and what to do."""
    remedies = {
        "nonfinite_operator": ("holds NaN or inf", "Check the arrays"),
        "not_semidefinite": ("tagged positive (or negative)", "Remove the tag"),
        "outside_domain": ("where the function is not finite", "shift the operator"),
        "not_converged": ("before the tolerance was reached", "Raise `max_k`"),
        "wrong_diagonal": ("not that of the operator", "Give that of the whole operator"),
        "not_symmetric": ("not even symmetric", "Remove the tag"),
    }
    own = set(tr.RESULTS._name_to_item) - set(lx.RESULTS._name_to_item)
    assert own == set(remedies)
    for name, (what, remedy) in remedies.items():
        text = tr.RESULTS[getattr(tr.RESULTS, name)]
        assert what in text
        assert remedy in text
        assert text.endswith(".")
