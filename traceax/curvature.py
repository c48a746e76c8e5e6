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

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from ._core.counts import checked_count
from ._core.precision import at_least_single
from ._operators.curvature import (
    Composition,
    CurvatureOperator as CurvatureOperator,
    Split,
    check_mode,
    make_curvature,
    path_name,
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


def _check_scalar(returned: Any, has_aux: bool = False) -> Array:
    """What a loss returns, or with `has_aux` the first of a pair: a floating-point scalar."""
    pair = isinstance(returned, tuple) and len(returned) == 2
    value: Any = returned[0] if has_aux and pair else returned
    if has_aux == pair and eqx.is_inexact_array(value) and value.shape == ():
        return value
    raise ValueError(
        f"With has_aux={has_aux} the loss must return a floating-point scalar array"
        f"{' and an auxiliary output' if has_aux else ''}, got {eqx.tree_pformat(returned)}. "
        "Reduce it (`jnp.mean(...)`), and say whether there is an auxiliary output: "
        f"`traceax.curvature.of(loss, has_aux={not has_aux})`."
    )


def _check_arrays(what: str, outputs: Any) -> Any:
    """Refuse outputs that cannot be differentiated."""
    leaves = jtu.tree_leaves(outputs)
    if not leaves or not all(eqx.is_inexact_array(leaf) for leaf in leaves):
        raise ValueError(
            f"{what} must return (a PyTree of) floating-point arrays, got "
            f"{eqx.tree_pformat(outputs)}. Convert integers with `.astype(float)`, and leave out "
            "auxiliary outputs."
        )
    return outputs


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
    curvature = of(loss, wrt=wrt, mode=mode)
    return curvature(params, *args, batches=batches, weights=weights)


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
    curvature = of(loss, predict=predict, wrt=wrt, convex=convex)
    return curvature(params, args, args, batches=batches, weights=weights)


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
        out = _check_arrays("log_likelihood", log_likelihood(params, *data))
        if not eqx.is_array(out) or out.ndim > 1:
            raise ValueError(
                "log_likelihood must return one number an example, an array of shape (N,), got "
                f"{jax.eval_shape(lambda: out)}. Do not sum over the examples."
            )
        return out

    moving = split_params(params, wrt)
    tags = (lx.positive_semidefinite_tag,)
    if sample is None or key is None:
        composition = Composition(
            inner=lambda index, params, *data: values(params, *data),
            outer=lambda out, at, *data: _half_square(out, 1 / out.size),
        )
        return make_curvature(composition, moving, args, batches, weights, tags)

    def drawn(index, params, *data):
        def draw(key):
            fresh = sample(key, params, *data)
            if not isinstance(fresh, tuple) or len(fresh) != len(data):
                raise ValueError(
                    "sample must return the arguments after `params` as a tuple of "
                    f"{len(data)}, got {jtu.tree_structure(fresh)}."
                )
            held = jtu.tree_map(lambda x: lax.stop_gradient(x) if eqx.is_array(x) else x, fresh)
            return values(params, *held)

        return jax.vmap(draw)(split(numbered(key, index), num_samples))

    # The probabilities of labels that were drawn depend on the parameters: d E[g g^T] =
    # E[d(g g^T) + g g^T d log p]. A factor p / p, of which only the numerator is differentiated,
    # has the derivative d log p.
    def reweighted(out, at, *data):
        at = at.astype(at_least_single(at.dtype))
        return _half_square(out, jnp.exp(at - lax.stop_gradient(at)) / out.size)

    composition = Composition(drawn, reweighted)
    return make_curvature(composition, moving, args, batches, weights, tags)


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
    composition = Composition(
        inner=lambda index, params, *data: _check_arrays("fn", fn(params, *data)),
        outer=lambda out, at, *data: _half_square(out),
    )
    tags = (lx.positive_semidefinite_tag,)
    return make_curvature(composition, split_params(params, wrt), args, batches, weights, tags)


class _Groups(NamedTuple):
    """Parameters in groups: a dictionary with one array of shape `(size,)` for each name."""

    names: list[Any]  # of each leaf the name, or the names of the entries along its leading axis
    structure: Any

    @classmethod
    def of(cls, moving: Any, groups: Callable[[str, Any], Any]) -> "_Groups":
        """The groups of these parameters.

        **Arguments:**

        - `moving`: the parameters that are differentiated.
        - `groups`: called as `groups(path, leaf)` for each; returns a name, or a list of names, one
            for each entry along the leading axis of the leaf.
        """
        names = []
        for path, leaf in jtu.tree_leaves_with_path(moving):
            name = groups(path_name(path), leaf)
            several = isinstance(name, tuple | list)
            if not (leaf.shape[:1] == (len(name),) if several else isinstance(name, str)):
                raise ValueError(
                    "groups must return a name (a str), or a list of names, one for each entry "
                    f"along the leading axis, got {name!r} for {path_name(path)!r} of shape "
                    f"{leaf.shape}. Return the path for a group of its own."
                )
            names.append(list(name) if several else name)
        return cls(names, structure_of(moving))

    def pack(self, moving: Any) -> dict[str, Array]:
        """The grouped parameters."""
        parts: dict[str, list[Array]] = {}
        for names, leaf in zip(self.names, jtu.tree_leaves(moving), strict=True):
            pieces = zip(names, leaf, strict=True) if isinstance(names, list) else [(names, leaf)]
            for name, piece in pieces:
                parts.setdefault(name, []).append(piece.reshape(-1))
        for name, pieces in parts.items():
            dtypes = sorted({str(x.dtype) for x in pieces})
            if len(dtypes) > 1:
                raise ValueError(
                    f"The parameters of a group need one dtype, got {dtypes} in {name!r}. Make a "
                    "group of each dtype."
                )
        return {name: jnp.concatenate(pieces) for name, pieces in parts.items()}

    def join(self, grouped: dict[str, Array], constant: Any) -> Any:
        """All parameters."""
        return eqx.combine(self.unpack(grouped), constant)

    def unpack(self, grouped: dict[str, Array]) -> Any:
        """The parameters (or another vector of their structure) from grouped ones."""
        rest = dict(grouped)

        def take(name, shape):
            size = math.prod(shape)
            piece = rest[name][:size].reshape(shape)
            rest[name] = rest[name][size:]
            return piece

        def leaf_of(names, struct):
            if isinstance(names, list):
                return jnp.stack([take(name, struct.shape[1:]) for name in names])
            return take(names, struct.shape)

        structs, treedef = jtu.tree_flatten(self.structure)
        leaves = [leaf_of(*pair) for pair in zip(self.names, structs, strict=True)]
        return jtu.tree_unflatten(treedef, leaves)


@final
@dataclasses.dataclass(frozen=True)
class Curvature:
    """What `traceax.curvature.of` returns: with parameters and data it makes an operator."""

    loss: Callable[..., Any]
    predict: Callable[..., PyTree] | None
    wrt: Callable[[str, Array], bool] | None
    groups: Callable[[str, Array], str | list[str]] | None
    has_aux: bool
    convex: bool
    mode: str
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
        - `args`: the other arguments of the loss. With `predict`: two tuples, the other arguments
            of the model, and those of the loss.
        - `batches`, `weights`: as for [`traceax.curvature.hessian`][].

        **Returns:**

        A [`traceax.curvature.CurvatureOperator`][].
        """
        split, join = split_params(params, self.wrt), eqx.combine
        if self.groups is not None:
            groups = _Groups.of(split.moving, self.groups)
            split = Split(groups.pack(split.moving), split.constant)
            join = groups.join
        composition = Composition(None, self._loss_of_params, join)
        tags = ()
        if self.predict is not None:
            if len(args) != 2 or not all(isinstance(x, tuple) for x in args):
                raise TypeError(
                    "With `predict` the call is `curvature(params, model_args, loss_args)`, with "
                    f"two tuples, got {[type(x).__name__ for x in args]}. An empty tuple is none."
                )
            composition = Composition(self._outputs, self._loss_of_outputs, join)
            tags = (lx.positive_semidefinite_tag,) if self.convex else ()
        return make_curvature(
            composition, split, args, batches, weights, tags, self.mode, self._traced
        )

    def _loss_of_params(self, params: Any, at: Any, *data: Any) -> Array:
        return _check_scalar(self.loss(params, *data), self.has_aux)

    def _outputs(self, index: Any, params: Any, *data: Any) -> Any:
        *batch, model_args, _ = data
        assert self.predict is not None
        return _check_arrays("predict", self.predict(params, *batch, *model_args))

    def _loss_of_outputs(self, out: Any, at: Any, *data: Any) -> Array:
        *batch, _, loss_args = data
        return _check_scalar(self.loss(out, *batch, *loss_args), self.has_aux)

    def ungroup(self, params: PyTree, vector: dict[str, Array]) -> PyTree:
        """A vector by groups, such as one of `Eigenpairs.vectors`, in the structure of the
        parameters.

        **Arguments:**

        - `params`: the parameters.
        - `vector`: the vector: a dictionary of arrays, by names of groups.

        **Returns:**

        A PyTree like those of the parameters that are differentiated.
        """
        if self.groups is None:
            raise ValueError(
                "There are no groups, `of` got groups=None: vectors have the structure of the "
                "parameters already."
            )
        return _Groups.of(split_params(params, self.wrt).moving, self.groups).unpack(vector)


def of(
    loss: Callable[..., Any],
    *,
    predict: Callable[..., PyTree] | None = None,
    wrt: Callable[[str, Array], bool] | None = None,
    groups: Callable[[str, Array], str | list[str]] | None = None,
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
    - `has_aux`: whether the loss returns a pair `(loss, aux)`.
    - `convex`: with `predict`, whether the loss is convex in the predictions.
    - `mode`: as for [`traceax.curvature.hessian`][].

    **Returns:**

    A function `curvature(params, *args, batches=None, weights=None)`; with `predict`,
    `curvature(params, model_args, loss_args, ...)` with two tuples. It returns a
    [`traceax.curvature.CurvatureOperator`][].

    **Raises:**

    - `ValueError`: for an unknown `mode`, or any other than `"forward"` with `predict`. Its calls
        raise what [`traceax.curvature.hessian`][] does.
    """
    check_mode(mode)
    if predict is not None and mode != "forward":
        raise ValueError(
            f"A Gauss-Newton matrix needs the forward mode of the model, got mode={mode!r}. Leave "
            "out `predict` for the Hessian."
        )
    return Curvature(loss, predict, wrt, groups, has_aux, convex, mode)
