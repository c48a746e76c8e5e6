r"""Curvature of functions of parameters, as lineax operators over the parameter PyTree.

Each function here returns a square, symmetric `lineax.AbstractLinearOperator` for
[`traceax.trace`][], [`traceax.diagonal`][] and the other functions. The input and output structure
of the operator is that of the parameters. Leaves that are not floating-point arrays (integers,
flags, activation functions) are held constant, and are `None` in that structure.

*Products.* Let the function be `L(f(params))`, of which `f` is linearised. Every product is

    A v = J^T (H_L) J v,     J the Jacobian of f, H_L the Hessian of L at f(params),

matrix-free and forward-over-reverse, and costs about as much as three to five evaluations of the
function. Everything that does not depend on v is computed once for all products.

*Batches.* With `batches`, the operator is the mean over slices along their leading axis. The slices
are accumulated by `lax.scan`, so that the memory is that of one batch.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from ._core.counts import checked_count
from ._core.precision import at_least_single, widened
from ._core.programs import closed_function
from ._estimators.solution import described
from ._operators.curvature import (
    CurvatureOperator as CurvatureOperator,
    Groups,
    check_arrays,
    check_batches,
    check_choice,
    check_mode,
    check_scalar,
    make_curvature,
    split_params,
    structure_of,
)
from ._probes.random import numbered, split


def _half_square(outputs: Any, scale: float | Array = 1.0) -> Array:
    """Half the squared norm, each number of which counts `scale` times: the Hessian is diagonal,
    with the entries `scale`. It is computed in float32 at least, in which a scale 1 / N is exact
    enough, and sums of many terms are.
    """
    with jax.numpy_dtype_promotion("standard"):
        wide = [x.astype(at_least_single(x.dtype)) for x in jtu.tree_leaves(outputs)]
        squares = [jnp.sum(scale * jnp.real(x * jnp.conj(x))) for x in wide]
        return 0.5 * jnp.asarray(sum(squares))


def _constant(tree: Any) -> Any:
    return jtu.tree_map(lambda x: lax.stop_gradient(x) if eqx.is_array(x) else x, tree)


def hessian(
    loss: Callable[..., Inexact[Array, ""]],
    params: PyTree,
    *args: Any,
    batches: PyTree = None,
    weights: ArrayLike | None = None,
    wrt: Callable[[str, Array], bool] | None = None,
    mode: Literal["forward", "reverse", "finite-difference"] = "forward",
) -> CurvatureOperator:
    r"""The Hessian $\nabla^2 L$ of a loss with respect to its parameters.

    !!! Example

        ```python
        operator = tr.curvature.hessian(loss, params, inputs, targets)
        solution = tr.trace(jax.random.key(0), operator, k=50)
        ```

    **Arguments:**

    - `loss`: called as `loss(params, *args)`, or `loss(params, batch, *args)` with batches;
        returns a scalar.
    - `params`: a PyTree, real. Leaves that are not floating-point arrays are held constant.
    - `args`: further arguments, held constant.
    - `batches`: a PyTree of arrays with a leading axis of the same length. Each slice along it is
        a batch, and the Hessian is averaged over the batches. By default the data are in `args`.
    - `weights`: one number for each batch, such as its number of examples where the last batch is
        padded; a batch of weight 0 does not count. By default all weigh the same.
    - `wrt`: called as `wrt(path, leaf)` for each floating-point array, with a path like
        `"params/Dense_0/kernel"`: whether it is a parameter. Batch statistics, frozen layers and
        buffers are not. By default all are.
    - `mode`: how the gradient is differentiated: `"forward"`, in forward mode; `"reverse"`, in
        reverse mode, for models whose gradients have no forward mode, in two to three times the
        memory; `"finite-difference"`, by a central difference of two gradients, for models whose
        gradients have no derivative at all (a `custom_vjp` with an opaque backward pass, a kernel).
        The products are then good to 4 eps^(2/3), 1e-4 in float32, which is a part of standard
        errors, if the loss is smooth where no parameter moves by more than eps^(1/3) times the root
        of their mean square; and estimates have no derivative. (Used at 10^11
        parameters in arXiv:2602.00816.)

    **Returns:**

    A lineax operator over the floating-point leaves of `params`, tagged symmetric. A product costs
    about four evaluations of the loss (a batch).

    **Raises:**

    - `ValueError`: for a loss that does not return a scalar, parameters without a floating-point
        array, complex parameters, arrays in `batches` with leading axes of different lengths,
        `weights` that are not one for each batch, or an unknown `mode`.

    ??? cite "References"

        B. A. Pearlmutter, *Fast exact multiplication by the Hessian*, 1994,
        doi:10.1162/neco.1994.6.1.147.
    """

    def outer(moving, constant, *data):
        return check_scalar("The loss", loss(eqx.combine(moving, constant), *data))

    check_mode(mode)
    options: dict[str, Any] = {"weights": weights, "wrt": wrt, "mode": mode}
    return make_curvature(None, outer, params, args, batches, **options)


def gauss_newton(
    predict: Callable[..., PyTree],
    loss: Callable[..., Inexact[Array, ""]],
    params: PyTree,
    *args: Any,
    batches: PyTree = None,
    weights: ArrayLike | None = None,
    wrt: Callable[[str, Array], bool] | None = None,
    convex: bool = True,
) -> CurvatureOperator:
    r"""The (generalised) Gauss-Newton matrix $J^\top H_L J$ of a loss of predictions.

    This is the Hessian of `loss(predict(params))` with the predictions linearised in the
    parameters. For the mean of a cross entropy, or of half a squared error, it is the exact Fisher
    matrix.

    **Arguments:**

    - `predict`: called as `predict(params, *args)`, or `predict(params, batch, *args)` with
        batches; returns a PyTree of floating-point arrays.
    - `loss`: called as `loss(predictions, *args)`, or `loss(predictions, batch, *args)`; returns a
        scalar.
    - `params`: a PyTree, real. Leaves that are not floating-point arrays are held constant.
    - `args`: further arguments of both functions, held constant.
    - `batches`, `weights`, `wrt`: as for [`traceax.curvature.hessian`][].
    - `convex`: whether the loss is convex in the predictions, as cross entropy and squared error
        are. The operator is then tagged positive semidefinite.

    **Returns:**

    A lineax operator over the floating-point leaves of `params`, tagged symmetric, and positive
    semidefinite if `convex`. A product costs a forward and a reverse pass through the predictions
    (a batch).

    **Raises:**

    - `ValueError`: as [`traceax.curvature.hessian`][], and for predictions that are not
        floating-point arrays.

    ??? cite "References"

        N. N. Schraudolph, *Fast curvature matrix-vector products for second-order gradient
        descent*, 2002, doi:10.1162/08997660260028683.
    """

    def inner(index, params, *data):
        return check_arrays("predict", predict(params, *data))

    def outer(out, constant, *data):
        return check_scalar("The loss", loss(out, *data))

    tags = (lx.positive_semidefinite_tag,) if convex else ()
    return make_curvature(inner, outer, params, args, batches, *tags, weights=weights, wrt=wrt)


def fisher(
    log_likelihood: Callable[..., Inexact[Array, " examples"]],
    params: PyTree,
    *args: Any,
    batches: PyTree = None,
    weights: ArrayLike | None = None,
    wrt: Callable[[str, Array], bool] | None = None,
    sample: Callable[..., tuple[Any, ...]] | None = None,
    key: PRNGKeyArray | None = None,
    num_samples: int = 1,
) -> CurvatureOperator:
    r"""The Fisher information matrix $\frac{1}{N} \sum_i g_i g_i^\top$ of N examples, where $g_i$
    is the gradient of the log-likelihood of the i-th example.

    Without `sample` it is the *empirical* matrix, with the labels in the data. With `sample` it is
    a *Monte Carlo* estimate, with labels drawn from the model. The expectation of this estimate is
    the true Fisher matrix at the given inputs.

    !!! Example

        ```python
        def log_likelihood(params, inputs, labels):  # one number an example
            log_probs = jax.nn.log_softmax(predict(params, inputs))
            return jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]

        def sample(key, params, inputs, labels):
            return inputs, jax.random.categorical(key, predict(params, inputs))

        empirical = tr.curvature.fisher(log_likelihood, params, inputs, labels)
        monte_carlo = tr.curvature.fisher(
            log_likelihood, params, inputs, labels, sample=sample, key=jax.random.key(0)
        )
        ```

    **Arguments:**

    - `log_likelihood`: called as `log_likelihood(params, *args)`, or `log_likelihood(params, batch,
        *args)` with batches; returns the log-likelihood of every example, an array of shape `(N,)`
        (a scalar counts as one example). The sign matters for derivatives with `sample` alone.
    - `params`: a PyTree, real. Leaves that are not floating-point arrays are held constant.
    - `args`: further arguments, held constant.
    - `batches`, `weights`, `wrt`: as for [`traceax.curvature.hessian`][].
    - `sample`: called as `sample(key, params, *args)`, or `sample(key, params, batch, *args)` with
        batches; returns the arguments after `params` as a tuple, with labels drawn from the model.
        By default the labels in the data are used.
    - `key`: a random key, for `sample`.
    - `num_samples`: how many times to draw the labels.

    **Returns:**

    A lineax operator over the floating-point leaves of `params`, tagged positive semidefinite. All
    products use the same labels, and hence the same matrix. The derivative with respect to the
    parameters contains that of the probabilities of labels that were drawn: its expectation is the
    derivative of the true matrix. A product costs a forward and a reverse pass.

    **Raises:**

    - `ValueError`: as [`traceax.curvature.hessian`][]; for log-likelihoods with more than one axis;
        if only one of `sample` and `key` is given, or `num_samples < 1`.

    ??? cite "References"

        F. Kunstner, L. Balles, P. Hennig, *Limitations of the empirical Fisher approximation for
        natural gradient descent*, 2019, arXiv:1905.12558.
    """
    if (sample is None) != (key is None):
        raise ValueError(
            "A Monte Carlo Fisher matrix needs both `sample` and `key`, the empirical one neither; "
            f"got a sample of type {type(sample).__name__} and a key of type {type(key).__name__}."
        )
    num_samples = checked_count(num_samples, "num_samples (draws for each example)")

    def values(params, *data):
        out = check_arrays("log_likelihood", log_likelihood(params, *data))
        if not eqx.is_array(out) or out.ndim > 1:
            raise ValueError(
                "log_likelihood must return one number an example, an array of shape (N,), got "
                f"{jax.eval_shape(lambda: out)}. Do not sum over the examples."
            )
        return out

    def inner(index, params, *data):
        if sample is None or key is None:
            return values(params, *data)
        draw = sample

        def drawn(key):
            fresh = draw(key, params, *data)
            if not isinstance(fresh, tuple) or len(fresh) != len(data):
                raise ValueError(
                    "sample must return the arguments after `params` as a tuple of "
                    f"{len(data)}, got {jtu.tree_structure(fresh)}."
                )
            return values(params, *_constant(fresh))

        return jax.vmap(drawn)(split(numbered(key, index), num_samples))

    # The probabilities of labels that were drawn depend on the parameters: d E[g g^T] =
    # E[d(g g^T) + g g^T d log p]. A factor p / p, of which only the numerator is differentiated,
    # has the derivative d log p.
    def outer(out, constant, *data, at=None):
        if at is None:
            return _half_square(out, 1 / out.size)
        at = at.astype(at_least_single(at.dtype))
        return _half_square(out, jnp.exp(at - lax.stop_gradient(at)) / out.size)

    tag, drawn = lx.positive_semidefinite_tag, sample is not None
    options: dict[str, Any] = {"weights": weights, "wrt": wrt, "reweighted": drawn}
    return make_curvature(inner, outer, params, args, batches, tag, **options)


def jacobian_gram(
    fn: Callable[..., PyTree],
    params: PyTree,
    *args: Any,
    batches: PyTree = None,
    weights: ArrayLike | None = None,
    wrt: Callable[[str, Array], bool] | None = None,
) -> CurvatureOperator:
    r"""The Gram matrix $J^\top J$ of the Jacobian of a function of the parameters.

    Its trace is $\|J\|_F^2$, the trace of the neural tangent kernel.

    **Arguments:**

    - `fn`: called as `fn(params, *args)`, or `fn(params, batch, *args)` with batches; returns a
        PyTree of floating-point arrays.
    - `params`: a PyTree, real. Leaves that are not floating-point arrays are held constant.
    - `args`: further arguments, held constant.
    - `batches`, `weights`, `wrt`: as for [`traceax.curvature.hessian`][].

    **Returns:**

    A lineax operator over the floating-point leaves of `params`, tagged positive semidefinite. A
    product costs a forward and a reverse pass through the function (a batch).

    **Raises:**

    - `ValueError`: as [`traceax.curvature.hessian`][], and for outputs that are not floating-point
        arrays.
    """

    def inner(index, params, *data):
        return check_arrays("fn", fn(params, *data))

    def outer(out, constant, *data):
        return _half_square(out)

    tag = lx.positive_semidefinite_tag
    return make_curvature(inner, outer, params, args, batches, tag, weights=weights, wrt=wrt)


@final
class Curvature:
    """What `traceax.curvature.of` returns: with parameters and data it makes an operator."""

    def __init__(
        self,
        loss: Callable[..., Any],
        predict: Callable[..., PyTree] | None,
        wrt: Callable[[str, Array], bool] | None,
        groups: Callable[[str, Array], str | list[str]] | None,
        weights: Callable[..., Any] | None,
        has_aux: bool,
        convex: bool,
        mode: str,
    ):
        """Made by `traceax.curvature.of`."""
        self._loss, self._predict, self._wrt, self._groups = loss, predict, wrt, groups
        self._weights, self._has_aux, self._mode = weights, has_aux, mode
        semidefinite = predict is not None and convex
        self._tags = (lx.positive_semidefinite_tag,) if semidefinite else ()
        self._programs: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy traces anew: jaxprs cannot be copied.
        return {**self.__dict__, "_programs": {}}

    def __call__(self, params: PyTree, *args: Any, batches: PyTree = None) -> CurvatureOperator:
        """The curvature at these parameters.

        **Arguments:**

        - `params`: the parameters.
        - `args`: the other arguments of the loss. With `predict`: two tuples, the other arguments
            of the model, and those of the loss.
        - `batches`: as for [`traceax.curvature.hessian`][].

        **Returns:**

        A [`traceax.curvature.CurvatureOperator`][].
        """
        split, join = split_params(params, self._wrt), _combine
        if self._groups is not None:
            grouping = Groups.of(split.moving, self._groups)
            split = split._replace(moving=grouping.pack(split.moving))
            join = partial(_combine, unpack=grouping.unpack)
        args, batches = jtu.tree_map(
            lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (args, batches)
        )
        first = () if batches is None else (jtu.tree_map(lambda x: x[0], batches),)
        if self._predict is None:
            inner, rest = None, args
            outer = partial(_loss_of_parameters, self._scalar, join)
        else:
            if len(args) != 2 or not all(isinstance(x, tuple) for x in args):
                raise TypeError(
                    "The curvature of a model and a loss is called as `curvature(params, "
                    "model_args, loss_args)` with two tuples, got "
                    f"{[type(x).__name__ for x in args]}. An empty tuple stands for no arguments."
                )
            _check_fit("predict", "model_args", self._predict, (params, *first, *args[0]))
            _check_fit("loss", "loss_args", self._loss, (None, *first, *args[1]))
            rest = (*args[0], *args[1])
            ends = len(first), len(first) + len(args[0])
            inner = partial(_predictions, self._predict, ends[1])
            outer = partial(_loss_of_predictions, self._scalar, *ends)
        weights = None
        if self._weights is not None:
            if batches is None:
                raise ValueError(
                    "weights weigh the `batches`, but got batches=None. Give the data as "
                    "`batches`, or weigh the examples of the only batch in the loss."
                )
            weigh = self._weights
            weights = jax.vmap(lambda batch: weigh(batch, *rest))(batches)
        return make_curvature(
            inner, outer, split, rest, batches, *self._tags, weights=weights, mode=self._mode,
            join=join, programs=self._programs, sampled=True,
        )  # fmt: skip

    def _scalar(self, *args: Any) -> Array:
        return check_scalar("The loss", self._loss(*args), self._has_aux)

    def ungroup(self, params: PyTree, vector: dict[str, Array]) -> PyTree:
        """A vector by groups, such as one of `Eigenpairs.vectors`, in the structure of the
        parameters.

        **Arguments:**

        - `params`: the parameters.
        - `vector`: the vector: a dictionary of arrays, by names of groups.

        **Returns:**

        A PyTree like those of the parameters that are differentiated.
        """
        if self._groups is None:
            raise ValueError(
                "There are no groups, `of` got groups=None: vectors have the structure of the "
                "parameters already."
            )
        return Groups.of(split_params(params, self._wrt).moving, self._groups).unpack(vector)


def _combine(moving: Any, constant: Any, unpack: Callable[[Any], Any] = lambda x: x) -> Any:
    return eqx.combine(unpack(moving), constant)


def _loss_of_parameters(loss, join, moving, constant, *data):
    return loss(join(moving, constant), *data)


def _predictions(predict, end, index, params, *data):
    return check_arrays("predict", predict(params, *data[:end]))


def _loss_of_predictions(loss, batch, end, out, constant, *data):
    return loss(out, *data[:batch], *data[end:])


def _check_fit(name: str, argument: str, function: Callable[..., Any], args: tuple) -> None:
    """Raise a `TypeError` if a function does not take so many arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables have none
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(
            f"{name}{signature} does not take {len(args)} arguments ({error}): what it takes after "
            f"the first (and a batch, with `batches`) belongs into the tuple {argument}."
        ) from None


def of(
    loss: Callable[..., Any],
    *,
    predict: Callable[..., PyTree] | None = None,
    wrt: Callable[[str, Array], bool] | None = None,
    groups: Callable[[str, Array], str | list[str]] | None = None,
    weights: Callable[..., Any] | None = None,
    has_aux: bool = False,
    convex: bool = True,
    mode: Literal["forward", "reverse", "finite-difference"] = "forward",
) -> Curvature:
    """A factory of curvature operators: the Hessian of a loss, or with `predict` its Gauss-Newton
    matrix, wherever the parameters are.

    The loss is traced once for all calls with arguments of the same structure, shapes and dtypes,
    so that an eager loop over training steps takes milliseconds a step. So make it once, and (as
    for `jax.jit`) let the loss take everything that changes as an argument: Python numbers among
    the arguments, too, are a part of the program.

    !!! Example

        ```python
        curvature = tr.curvature.of(
            loss,
            wrt=lambda path, leaf: path.startswith("params/"),  # not the batch statistics
            groups=lambda path, leaf: path.split("/")[1],  # by layer
        )
        for key, (params, batch) in steps:
            layers = tr.block_traces(key, curvature(params, batch), k=20)
            layers.value["Dense_0"], layers.std_err["Dense_0"]
        ```

        The Gauss-Newton matrix of a model and a loss with arguments of their own:

        ```python
        curvature = tr.curvature.of(cross_entropy, predict=model)
        operator = curvature(params, (inputs,), (labels,))  # model(params, inputs)
        ```

    **Arguments:**

    - `loss`: called as `loss(params, *args)`, or `loss(params, batch, *args)` with batches; with
        `predict` as `loss(predictions, *loss_args)`, or `loss(predictions, batch, *loss_args)`.
    - `predict`: the model, called as `predict(params, *model_args)`, or `predict(params, batch,
        *model_args)`. By default the operator is the Hessian.
    - `wrt`: as for [`traceax.curvature.hessian`][].
    - `groups`: called as `groups(path, leaf)`: the name of the group that it belongs to, or a list
        of names, one for each entry along its leading axis (layers that are stacked for a scan).
        The operator is then one over a dictionary of groups, with one array of shape `(size,)` for
        each, which is what `traceax.block_traces` and `traceax.eigenpairs` report by.
    - `weights`: called as `weights(batch, *args)` for each of the `batches`: its weight, such as
        the number of examples that are not padding.
    - `has_aux`: whether the loss returns a pair `(loss, aux)`.
    - `convex`: with `predict`, whether the loss is convex in the predictions.
    - `mode`: as for [`traceax.curvature.hessian`][].

    **Returns:**

    A function `curvature(params, *args, batches=None)`; with `predict`, `curvature(params,
    model_args, loss_args, batches=None)` with two tuples. It returns a
    [`traceax.curvature.CurvatureOperator`][].

    **Raises:**

    - `TypeError`: for anything but functions as `loss`, `wrt` and `groups`.
    - `ValueError`: for an unknown `mode`, or any other than `"forward"` with `predict`. Its calls
        raise what [`traceax.curvature.hessian`][] does.
    """
    if not callable(loss):
        raise TypeError(
            f"The loss must be a function, got a {type(loss).__name__}: parameters and data are "
            "given to what `of(loss)` returns."
        )
    check_choice("wrt", wrt)
    check_choice("groups", groups)
    check_mode(mode)
    if predict is not None and mode != "forward":
        raise ValueError(
            f"A Gauss-Newton matrix needs the forward mode of the model, got mode={mode!r}. Leave "
            "out `predict` for the Hessian."
        )
    return Curvature(loss, predict, wrt, groups, weights, has_aux, convex, mode)


@final
class NoiseScale(eqx.Module):
    """What `traceax.curvature.noise_scale` estimates. Every field has its standard error.

    **Attributes:**

    - `trace`: tr(Sigma), the trace of the covariance of the gradients of single examples.
    - `square`: |G|^2, the squared norm of the expected gradient; unbiased, so that it may be
        negative where noise is all there is.
    - `scale`: the simple noise scale tr(Sigma) / |G|^2: about the batch size beyond which larger
        batches help little. Inf where `square` is not positive.
    - `trace_std_err`, `square_std_err`, `scale_std_err`: their standard errors, by the jackknife
        over examples. Inf for fewer than three examples, and that of an infinite scale.
    - `norms`: |g_i|^2 for every example: the traces of the terms of the empirical Fisher matrix.
    """

    trace: Array
    square: Array
    scale: Array
    trace_std_err: Array
    square_std_err: Array
    scale_std_err: Array
    norms: Inexact[Array, " examples"]

    def __repr__(self) -> str:
        """See `described`."""
        return described("NoiseScale", vars(self))


NoiseScale.__init__.__doc__ = (NoiseScale.__doc__ or "").replace(
    "**Attributes:**", "**Arguments:**"
)


def _noise_of(mean: Array, square: Array, count: Array | int) -> tuple[Array, Array, Array]:
    """tr(Sigma), |G|^2 and their ratio, from the mean of |g_i|^2 and |mean of g_i|^2."""
    trace = count / (count - 1) * (mean - square)
    expected = square - trace / count
    positive = expected > 0
    return trace, expected, jnp.where(positive, trace / jnp.where(positive, expected, 1), jnp.inf)


def noise_scale(
    loss: Callable[..., Inexact[Array, ""]],
    params: PyTree,
    examples: PyTree,
    *args: Any,
    batch_size: int = 32,
    wrt: Callable[[str, Array], bool] | None = None,
    has_aux: bool = False,
) -> NoiseScale:
    r"""The noise of the gradients: the trace of their covariance, and the simple noise scale
    $\mathrm{tr}(\Sigma) / |G|^2$.

    With the gradients $g_i$ of N examples and their mean $\bar g$, the unbiased estimates are
    $\mathrm{tr}(\Sigma) = \frac{1}{N - 1} \sum_i |g_i - \bar g|^2$ and
    $|G|^2 = |\bar g|^2 - \mathrm{tr}(\Sigma) / N$. No random probes are drawn: the errors are those
    of the examples, by the jackknife.

    !!! Example

        ```python
        def loss(params, example):  # of a single example
            image, label = example
            return -jax.nn.log_softmax(predict(params, image))[label]

        noise = tr.curvature.noise_scale(loss, params, (images, labels))
        noise.scale, noise.scale_std_err
        ```

    Cost: the gradients of all examples, `batch_size` of them in memory at a time, and a forward
    pass each.

    **Arguments:**

    - `loss`: called as `loss(params, example, *args)`; returns the loss of one example, a scalar.
    - `params`: a PyTree, real. Leaves that are not floating-point arrays are held constant.
    - `examples`: a PyTree of arrays with a leading axis of the same length N, at least two: the
        inputs, and in a tuple with them the labels.
    - `args`: further arguments, the same for all examples, held constant.
    - `batch_size`: how many gradients to hold at a time.
    - `wrt`: as for [`traceax.curvature.hessian`][].
    - `has_aux`: whether the loss returns a pair `(loss, aux)`.

    **Returns:**

    A [`traceax.curvature.NoiseScale`][].

    **Raises:**

    - `ValueError`: as [`traceax.curvature.hessian`][], and for fewer than two examples.

    ??? cite "References"

        S. McCandlish, J. Kaplan, D. Amodei, *An empirical model of large-batch training*, 2018,
        arXiv:1812.06162.
    """
    moving, constant = split_params(params, wrt)
    batch_size = checked_count(batch_size, "batch_size (examples at once)")
    examples = check_batches(examples, "examples")
    count = jtu.tree_leaves(examples)[0].shape[0]
    if count < 2:
        raise ValueError(
            f"A covariance needs at least two examples, got {count}. Give each example as one "
            "entry along the leading axis of `examples`."
        )

    def of_example(moving, example):
        value = loss(eqx.combine(moving, constant), example, *args)
        return check_scalar("The loss", value, has_aux)

    closed = closed_function(of_example, structure_of(moving), structure_of(examples, axes=1))
    return _noise_scale(closed, moving, examples, min(batch_size, count))


@eqx.filter_jit
def _noise_scale(
    of_example: Callable[..., Array], moving: PyTree, examples: PyTree, width: int
) -> NoiseScale:
    """See `noise_scale`; `width` gradients are held at a time."""
    count = jtu.tree_leaves(examples)[0].shape[0]

    def wide(tree):  # sums of many terms in half precision cease to grow, and squares overflow
        return widened(tree)[0]

    def dot(a, b):
        pairs = zip(jtu.tree_leaves(a), jtu.tree_leaves(b), strict=True)
        return jnp.asarray(sum(jnp.sum(x * y) for x, y in pairs))

    def with_norm(example):
        gradient = wide(jax.grad(of_example)(moving, example))
        return gradient, dot(gradient, gradient)

    with jax.numpy_dtype_promotion("standard"):
        zero = jtu.tree_map(jnp.zeros_like, wide(moving))
        whole = count // width

        def block(total, each):
            gradients, norms = jax.vmap(with_norm)(each)
            return jtu.tree_map(lambda t, g: t + jnp.sum(g, axis=0), total, gradients), norms

        cut = jtu.tree_map(
            lambda x: x[: whole * width].reshape(whole, width, *x.shape[1:]), examples
        )
        total, norms = lax.scan(block, zero, cut)
        norms = norms.reshape(-1)
        if whole * width < count:
            total, more = block(total, jtu.tree_map(lambda x: x[whole * width :], examples))
            norms = jnp.concatenate([norms, more])
        mean = jtu.tree_map(lambda x: x / count, total)
        first, second = jnp.mean(norms), dot(mean, mean)
        # <g_i, mean of g> by a forward pass, along a direction of length 1.
        length = jnp.where(second > 0, jnp.sqrt(second), 1)
        direction = jtu.tree_map(lambda x, like: (x / length).astype(like.dtype), mean, moving)
        along = length * lax.map(
            lambda e: wide(jax.jvp(lambda p: of_example(p, e), (moving,), (direction,))[1]),
            examples,
            batch_size=width,
        )
        found = _noise_of(first, second, count)
        # Without example i:
        others = (count * first - norms) / (count - 1)
        squares = (second - 2 * along / count + norms / count / count) * (count / (count - 1)) ** 2

        def jackknife(values):
            spread = jnp.sum(jnp.square(values - jnp.mean(values)))
            error = jnp.sqrt((count - 1) / count * spread)
            return jnp.where(jnp.isfinite(error), error, jnp.inf)

        if count < 3:
            errors = [jnp.full((), jnp.inf, first.dtype)] * 3
        else:
            errors = [jackknife(x) for x in _noise_of(others, squares, count - 1)]
    return NoiseScale(
        trace=found[0],
        square=found[1],
        scale=found[2],
        trace_std_err=errors[0],
        square_std_err=errors[1],
        scale_std_err=errors[2],
        norms=norms,
    )
