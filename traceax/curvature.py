"""Curvature of functions of parameters, as lineax operators over the parameter PyTree.

Each function here returns a square, symmetric `lineax.AbstractLinearOperator` for
[`traceax.trace`][], [`traceax.diagonal`][] and the other functions, with the structure of the
parameters. Leaves that are not floating-point arrays (integers, flags, activation functions) are
constants, and `None` in that structure.

A product, see `_operators.curvature`, costs about three to five evaluations of the function.
"""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any, Literal, final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax.typing import ArrayLike
from jaxtyping import Array, PRNGKeyArray, PyTree

from ._core.counts import checked_count
from ._core.derivatives import change_of, constant
from ._core.precision import at_least_single
from ._core.programs import Static, closed_function
from ._operators.curvature import (
    MODES,
    CurvatureOperator as CurvatureOperator,
    check_batches,
    forward_form,
)
from ._operators.parameters import (
    Choice,
    Groups,
    as_jax,
    join,
    split_params,
    structure_of,
    ungroup as ungroup,
)
from ._operators.precision import eps_along, eps_of_product
from ._probes.random import numbered, split

_POSITIVE = (lx.positive_semidefinite_tag,)


# --- what functions return ------------------------------------------------------------------------


def _value(returned: Any, has_aux: bool) -> Any:
    """What a loss returns, or with `has_aux` the first of a pair."""
    if has_aux != (isinstance(returned, tuple) and len(returned) == 2):
        raise ValueError(
            f"With has_aux={has_aux} the loss must return {'a pair' if has_aux else 'an array'}, "
            f"got {eqx.tree_pformat(returned)}. Say has_aux={not has_aux} if it "
            f"{'has no' if has_aux else 'returns a pair with an'} auxiliary output."
        )
    return returned[0] if has_aux else returned


def _arrays(outputs: Any) -> Any:
    """What a function returns whose outputs are differentiated."""
    leaves = jtu.tree_leaves(outputs)
    if not leaves or not all(eqx.is_inexact_array(leaf) for leaf in leaves):
        raise ValueError(
            "The function must return (a PyTree of) floating-point arrays, got "
            f"{eqx.tree_pformat(outputs)}. Convert integers with `.astype(float)`, and leave out "
            "auxiliary outputs."
        )
    return outputs


# --- operators ------------------------------------------------------------------------------------


def hessian(
    loss: Callable[..., Any],
    params: PyTree,
    *args: Any,
    batches: PyTree = None,
    weights: ArrayLike | None = None,
    wrt: Callable[[str, Any], bool] | type | None = None,
    groups: Callable[[str, Any], str | list[str]] | None = None,
    has_aux: bool = False,
    mode: Literal["forward", "reverse", "finite-difference"] = "forward",
) -> CurvatureOperator:
    r"""The Hessian $\nabla^2 L$ of a loss with respect to its parameters.

    **Cost:** a product takes about four evaluations of the loss (of a batch).

    **Arguments:**

    - `loss`: called as `loss(params, *args)`, or `loss(params, batch, *args)` with batches.
    - `params`: a PyTree, real. An array in two places is two parameters, a variable of nnx one.
    - `args`: further arguments, held constant.
    - `batches`: a PyTree of arrays with a leading axis of the same length. The Hessian is averaged
        over the slices along it, one of them in memory at a time.
    - `weights`: one number for each batch, such as its number of examples where the last batch is
        padded. By default all weigh the same. A batch of weight 0 does not count, and derivatives
        by its weight are NaN.
    - `wrt`: called as `wrt(path, leaf)` for each floating-point array (or variable of nnx), with a
        path like `"params/Dense_0/kernel"`: whether it is a parameter. It may be a type of
        variables. By default all are but statistics and random states of Flax.
    - `groups`: called as `groups(path, leaf)`: the name of the group that it belongs to, or a list
        of names, one for each entry along its leading axis. The operator is then one over a
        dictionary with one array for each group, and [`traceax.block_traces`][]
        has one trace for each.
    - `has_aux`: whether the loss returns a pair `(loss, aux)`.
    - `mode`: how the gradient is differentiated: `"forward"`; `"reverse"`, in two to three times
        the memory, where it has no forward mode; `"finite-difference"`, where it has no derivative:
        products are then good to $4 \epsilon^{2/3}$ ($\epsilon$: that of the dtype), and
        estimates have no derivative.

    **Returns:** a lineax operator over the parameters, tagged symmetric.

    **Raises:** `ValueError`, `TypeError`: for parameters, batches or outputs that do not fit.

    **Source:** B. A. Pearlmutter, 1994, doi:10.1162/neco.1994.6.1.147.
    """
    curvature = of(loss, wrt=wrt, groups=groups, has_aux=has_aux, mode=mode)
    return curvature(params, *args, batches=batches, weights=weights)


def gauss_newton(
    predict: Callable[..., PyTree],
    loss: Callable[..., Any],
    params: PyTree,
    *args: Any,
    batches: PyTree = None,
    weights: ArrayLike | None = None,
    wrt: Callable[[str, Any], bool] | type | None = None,
    groups: Callable[[str, Any], str | list[str]] | None = None,
    has_aux: bool = False,
    convex: bool = True,
) -> CurvatureOperator:
    r"""The (generalised) Gauss-Newton matrix $J^\top H_L J$ of a loss of predictions.

    This is the Hessian of `loss(predict(params))` with the predictions linearised in the
    parameters: for the mean of a cross entropy, or of half a squared error, the exact Fisher
    matrix.

    **Cost:** a product takes a forward and a reverse pass through the predictions (of a batch).

    **Arguments:**

    - `predict`: called as `predict(params, *args)`, or `predict(params, batch, *args)` with
        batches; returns a PyTree of floating-point arrays.
    - `loss`: called as `loss(predictions, *args)`, or `loss(predictions, batch, *args)`, with the
        same `args`; see [`traceax.curvature.of`][] for others.
    - `params`, `args`, `batches`, `weights`, `wrt`, `groups`, `has_aux`: as for
        [`traceax.curvature.hessian`][].
    - `convex`: whether the loss is convex in the predictions, as cross entropy and squared error
        are. The operator is then tagged positive semidefinite.

    **Returns:** a lineax operator over the parameters, tagged symmetric, and positive semidefinite
    if `convex`.

    **Raises:** as [`traceax.curvature.hessian`][].

    **Source:** N. N. Schraudolph, 2002, doi:10.1162/08997660260028683.
    """
    data = args if batches is None else (batches, *args)
    for name, fn in (("predict", predict), ("loss", loss)):
        try:
            signature(fn).bind(params, *data)
        except TypeError as error:
            raise TypeError(
                f"`{name}` must take {1 + len(data)} arguments, as `predict` and `loss` get the "
                f"same data: {error}. For others call `traceax.curvature.of(loss, "
                "predict=predict)(params, predict_args, loss_args)`."
            ) from error
    curvature = of(loss, predict=predict, wrt=wrt, groups=groups, has_aux=has_aux, convex=convex)
    return curvature(params, args, args, batches=batches, weights=weights)


def fisher(
    log_likelihood: Callable[..., Any],
    params: PyTree,
    *args: Any,
    batches: PyTree = None,
    weights: ArrayLike | None = None,
    wrt: Callable[[str, Any], bool] | type | None = None,
    groups: Callable[[str, Any], str | list[str]] | None = None,
    has_aux: bool = False,
    sample: Callable[..., tuple[Any, ...]] | None = None,
    key: PRNGKeyArray | None = None,
    num_samples: int = 1,
) -> CurvatureOperator:
    r"""The Fisher information matrix $\frac{1}{N} \sum_i g_i g_i^\top$ of N examples, with $g_i$
    the gradient of the log-likelihood of the i-th example.

    Without `sample` it is the *empirical* matrix, with the labels in the data; with `sample` a
    *Monte Carlo* estimate, whose expectation is the true Fisher matrix at the given inputs.

    **Cost:** a product takes a forward and a reverse pass through the log-likelihoods.

    **Arguments:**

    - `log_likelihood`: called as the loss of [`traceax.curvature.hessian`][]; returns an array of
        shape `(N,)`, one number for each example (a scalar counts as one example).
    - `params`, `args`, `batches`, `weights`, `wrt`, `groups`, `has_aux`: as there.
    - `sample`: called as `sample(key, params, *args)`, or `sample(key, params, batch, *args)` with
        batches; returns the arguments after `params` as a tuple, with labels drawn from the model,
        such as `(inputs, jax.random.categorical(key, predict(params, inputs)))`.
    - `key`: a random key, for `sample`.
    - `num_samples`: how many times to draw the labels.

    **Returns:** a lineax operator over the parameters, tagged positive semidefinite, with the same
    labels in all products. The expectation of its derivative is the derivative of the true matrix.

    **Raises:** as [`traceax.curvature.hessian`][].

    **Source:** F. Kunstner, L. Balles, P. Hennig, 2019, arXiv:1905.12558.
    """
    if (sample is None) != (key is None):
        raise ValueError(
            f"`sample` and `key` belong together, got {type(sample).__name__} and "
            f"{type(key).__name__}. Give both for a Monte Carlo Fisher matrix, else neither."
        )
    num_samples = checked_count(num_samples, "num_samples (draws for each example)")

    def values(index, params, *data):
        del index
        out = _arrays(_value(log_likelihood(params, *data), has_aux))
        if not eqx.is_array(out) or out.ndim > 1:
            raise ValueError(
                "log_likelihood must return one number an example, an array of shape (N,), got "
                f"{jax.eval_shape(lambda: out)}. Do not sum over the examples."
            )
        return out

    # sum_i g_i g_i^T / N = J^T H J: J of the log-likelihoods (`inner`), H = I / N of the mean
    # square (`outer`).
    inner = values
    outer = _mean_square
    if sample is not None and key is not None:
        inner = partial(_drawn, values, sample, key, num_samples)
        outer = _reweighted_mean_square
    curvature = Curvature(inner, outer, wrt, groups, _POSITIVE)
    return curvature(params, *args, batches=batches, weights=weights)


def _drawn(values: Any, sample: Any, key: Any, num_samples: int, index: Any, params: Any, *data):
    """`values` on labels that are drawn for each batch."""

    def draw(key):
        fresh = sample(key, params, *data)
        if not isinstance(fresh, tuple) or len(fresh) != len(data):
            raise ValueError(
                f"sample must return a tuple of {len(data)}, got {jtu.tree_structure(fresh)}. "
                "Return all arguments after `params`, with the labels drawn."
            )
        return values(index, params, *constant(fresh))

    return jax.vmap(draw)(split(numbered(key, index), num_samples))


def _mean_square(out: Array, fixed: Any, *data: Any, weights: float | Array = 1.0) -> Array:
    """Half the mean square, with a diagonal Hessian of entries `weights / N`, in float32 at least:
    there 1 / N and sums of many terms are exact enough.
    """
    with jax.numpy_dtype_promotion("standard"):
        wide = out.astype(at_least_single(out.dtype))
        return 0.5 * jnp.sum(weights / out.size * jnp.square(wide))


def _reweighted_mean_square(out: Array, fixed: Array, *data: Any) -> Array:
    # The probabilities of labels that were drawn depend on the parameters: d E[g g^T] =
    # E[d(g g^T) + g g^T d log p]. A factor p / p, of which only the numerator is differentiated,
    # has the derivative d log p.
    fixed = fixed.astype(at_least_single(fixed.dtype))
    return _mean_square(out, fixed, weights=jnp.exp(change_of(fixed)))


@final
@dataclasses.dataclass(frozen=True)
class Curvature:
    """What `traceax.curvature.of` returns: with parameters and data it makes an operator."""

    inner: Callable[..., Any] | None  # (index of the batch, params, *data) -> outputs; None: params
    outer: Callable[..., Array]  # (outputs, fixed, *data) -> a scalar
    wrt: Choice = None
    groups: Groups | None = None
    tags: tuple[object, ...] = ()
    mode: str = "forward"
    # The programs of this loss, by the structure of all arguments.
    _traced: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # A copy traces anew: jaxprs cannot be copied.
        return {**self.__dict__, "_traced": {}}

    def __call__(
        self, params: PyTree, *args: Any, batches: PyTree = None, weights: ArrayLike | None = None
    ) -> CurvatureOperator:
        """The curvature at these parameters.

        **Arguments:**

        - `params`: the parameters.
        - `args`: the other arguments of the loss; with `predict` two tuples, those of the model and
            those of the loss.
        - `batches`, `weights`: as for [`traceax.curvature.hessian`][].
        """
        moving, constant = split_params(params, self.wrt, self.groups)
        batches, weights = check_batches(batches, weights)
        arrays, static = eqx.partition((constant, as_jax(args)), eqx.is_array)
        vector = structure_of(moving)
        indexed = (structure_of(jnp.asarray(0)), structure_of(batches, axes=1))
        example = (vector, indexed, vector, structure_of(arrays))
        leaves, treedef = jtu.tree_flatten((example, static))
        place = Static((treedef, *leaves))
        programs = self._traced.get(place)
        if programs is None:
            programs = self._programs(example, static)
            # Functions that hold traced arrays differ from call to call.
            if not any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(programs)):
                self._traced[place] = programs
        product, form, precision = programs
        return CurvatureOperator(
            product=product,
            form=form,
            params=moving,
            arrays=arrays,
            batches=batches,
            weights=weights,
            tags=frozenset((lx.symmetric_tag, *self.tags)),
            precision=precision,
            differences=self.mode == "finite-difference",
        )

    def _programs(self, example: Any, static: Any) -> tuple[Any, Any, float]:
        """The product, the quadratic form and the precision of products, for arrays like these."""

        def closed(method):
            return closed_function(partial(self._evaluated, method, static), *example)

        product = closed(MODES[self.mode])
        moving, indexed, vector, arrays = example
        followed = (moving, False), (indexed, False), (vector, True), (arrays, False)
        if self.mode == "finite-difference":
            # Twice the two errors of `difference_product`, where the loss is smooth.
            return product, None, 4 * eps_along(product, *followed) ** (2 / 3)
        form = None
        if self.mode == "forward":
            with suppress(TypeError, NotImplementedError):  # a `jax.custom_vjp` has no forward mode
                form = closed(forward_form)
        # Many networks compute in half precision with parameters of single precision.
        return product, form, eps_of_product(product, *followed)

    def _evaluated(self, method, static, moving, indexed, vector, arrays):
        """A product or a form, `method`, with all arrays as arguments."""
        index, batch = indexed
        constant, args = eqx.combine(arrays, static)
        data = args if batch is None else (batch, *args)

        def inner(moving):
            if self.inner is None:
                return moving
            return self.inner(index, join(moving, constant), *data)

        def outer(out, fixed):
            return self.outer(join(out, constant) if self.inner is None else out, fixed, *data)

        return method(inner, outer, moving, vector)


def _loss_of_params(loss: Callable, has_aux: bool, params: Any, fixed: Any, *data: Any) -> Array:
    return _value(loss(params, *data), has_aux)


def _loss_of_outputs(loss: Callable, has_aux: bool, out: Any, fixed: Any, *data: Any) -> Array:
    *batch, _, loss_args = data
    return _value(loss(out, *batch, *loss_args), has_aux)


def _outputs(predict: Callable, index: Any, params: Any, *data: Any) -> Any:
    *batch, predict_args, loss_args = data if len(data) > 1 else (None, None)
    if not isinstance(predict_args, tuple) or not isinstance(loss_args, tuple):
        raise TypeError(
            "With `predict` the call is `curvature(params, predict_args, loss_args)`, with two "
            f"tuples, got {[type(x).__name__ for x in data]}. For none give ()."
        )
    return _arrays(predict(params, *batch, *predict_args))


def of(
    loss: Callable[..., Any],
    *,
    predict: Callable[..., PyTree] | None = None,
    wrt: Callable[[str, Any], bool] | type | None = None,
    groups: Callable[[str, Any], str | list[str]] | None = None,
    has_aux: bool = False,
    convex: bool = True,
    mode: Literal["forward", "reverse", "finite-difference"] = "forward",
) -> Curvature:
    """A factory of curvature operators: the Hessian of a loss, or with `predict` its Gauss-Newton
    matrix, at any parameters.

    The loss is traced once for all calls with arguments of the same structure, shapes and dtypes.
    So make the factory once, and (as for `jax.jit`) let the loss take arrays for what changes.

    **Arguments:**

    - `loss`: called as for [`traceax.curvature.hessian`][]; with `predict` as
        `loss(predictions, *loss_args)`, or `loss(predictions, batch, *loss_args)`.
    - `predict`: the model, called as `predict(params, *predict_args)`, or `predict(params, batch,
        *predict_args)`. By default the operator is the Hessian.
    - `wrt`, `groups`, `has_aux`, `mode`: as for [`traceax.curvature.hessian`][].
    - `convex`: as for [`traceax.curvature.gauss_newton`][].

    **Returns:** a function `curvature(params, *args, batches=None, weights=None)`; with `predict`,
    `curvature(params, predict_args, loss_args, ...)` with two tuples. It returns a
    [`traceax.curvature.CurvatureOperator`][].

    **Raises:** as [`traceax.curvature.hessian`][].
    """
    if mode not in (MODES if predict is None else ("forward",)):
        raise ValueError(
            f'mode must be one of {list(MODES)}, and with `predict` "forward", got {mode!r}. '
            "Leave out `predict` for the Hessian."
        )
    if predict is None:
        outer = partial(_loss_of_params, loss, has_aux)
        return Curvature(None, outer, wrt, groups, mode=mode)
    outer = partial(_loss_of_outputs, loss, has_aux)
    tags = _POSITIVE if convex else ()
    return Curvature(partial(_outputs, predict), outer, wrt, groups, tags)
