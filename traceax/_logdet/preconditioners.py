"""Classes that build a preconditioner: of low rank plus a multiple of the identity
(`sketch`), or of low rank plus a sparse inverse factor (`sparse_factor`).
"""

import abc
from functools import partial
from typing import Any, final

import equinox as eqx
import jax
import jax.core
import lineax as lx
from equinox import AbstractVar
from jaxtyping import Array, PRNGKeyArray

from .._core.counts import checked_count
from .._core.derivatives import constant
from .._core.primitive import compiled_once
from .._estimators.estimator import check_key
from .._operators.checks import as_operator
from .._operators.known_parts import has_entries, split_shift
from .._operators.tags import semidefinite_sign
from .factors import BuiltPreconditioner, diagonal_preconditioner
from .sketch import Sketch
from .sparse_factor import prepare

_checked_rank = partial(checked_count, name="rank", none="it is chosen from the budget")
_checked_neighbours = partial(checked_count, name="neighbours", none="24")


def check_definite(operator: lx.AbstractLinearOperator, name: str) -> None:
    """Raise a `ValueError` unless the operator, or its parts, are tagged positive semidefinite."""
    if semidefinite_sign(operator) == 1:
        return
    # c K + s I is not tagged if c or s is traced: the products will tell if it is not positive.
    # All terms must be diagonal or tagged, and their coefficients not known to make it negative.
    sign = split_shift(operator).sign
    if sign is None or not (isinstance(sign, jax.core.Tracer) or sign > 0):
        raise ValueError(
            f"{name} needs a positive definite operator, and this {type(operator).__name__} is not "
            "tagged so. If it is, tag it, or of a sum each term, `lineax.TaggedLinearOperator("
            "operator, lineax.positive_semidefinite_tag)`."
        )


#: A preconditioner, the products that it took, statistics of the call, and of a sketch of vectors w
#: that may go unused (w, w^H M w, their number); None without one.
Preparation = tuple[BuiltPreconditioner, Any, dict[str, Array], Any]


class AbstractPreconditioner(eqx.Module):
    """How to build a preconditioner. Final subclasses declare `rank` and implement `of_rank`."""

    rank: AbstractVar[int | None]

    def check(self, operator: lx.AbstractLinearOperator) -> None:
        """Raise a `ValueError` if the preconditioner cannot be built for this `operator`."""

    @abc.abstractmethod
    def of_rank(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, rank: int
    ) -> BuiltPreconditioner:
        """The preconditioner, from `rank` products. The caller has checked the arguments."""

    def prepared(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
    ) -> Preparation:
        """The preconditioner of a call with a budget."""
        if k <= 3:
            return diagonal_preconditioner(operator), 0, {}, None
        rank = min(self.rank or 2 * k // 3, k - 3)  # leaves two steps of a probe
        return self.of_rank(key, operator, rank), rank, {}, None

    def build(self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator) -> BuiltPreconditioner:
        """Build the preconditioner, to be held while the operator changes, from `rank` matvecs.

        !!! Example

            ```python
            held = tr.NystromPreconditioner(rank=200).build(jax.random.key(1), covariance(theta))
            tr.logdet(jax.random.key(0), covariance(other), k=200, preconditioner=held)
            ```

        **Arguments:**

        - `key`: a random key.
        - `operator`: the operator to build it for, as for [`traceax.logdet`][].

        **Returns:** a [`traceax.BuiltPreconditioner`][].

        **Raises:** `TypeError` for a key or operator of the wrong type; `ValueError` for
        an operator that is not square or not tagged positive semidefinite, or if the
        preconditioner cannot be built for it.
        """
        key = check_key(key)
        operator = as_operator(operator)
        check_definite(operator, "A preconditioner")
        self.check(operator)
        n = operator.in_size()
        rank = min(self.rank or default_rank(n), n)

        # What is held is a constant: no factorisation needs to be differentiated.
        chosen, operator = constant((self, operator))
        return compiled_once(type(self).of_rank, chosen, key, operator, rank)


@final
class NystromPreconditioner(AbstractPreconditioner):
    r"""A randomised Nystrom approximation, for any positive definite operator.

    $P = U \Lambda U^* + \mu I$ from `rank` products with normal test vectors. P keeps a diagonal
    part that is written down (`K + s I`) exactly; otherwise the smallest eigenvalue is estimated.
    Cost: `rank` matvecs, `n x rank` numbers, about `15 n rank^2` operations.
    (`preconditioner="auto"` spends up to three quarters of the budget on the rank.)

    **Arguments:**

    - `rank`: the rank, which is also the number of products. By default two thirds of the budget,
        and never more than the budget less three. (For `build`: a tenth of the rows, from 64 to
        512.)

    **Source:** Z. Frangella, J. A. Tropp, M. Udell, 2023, arXiv:2110.02820.
    """

    rank: int | None = eqx.field(default=None, static=True, converter=_checked_rank)

    def of_rank(self, key, operator, rank):
        """See `AbstractPreconditioner`."""
        sketch = Sketch(key, operator, rank, rank)
        return sketch.built(sketch.low_rank(sketch.first))


def default_rank(n: int) -> int:
    """The largest rank where columns cost no product: n^2 rank operations for the neighbours, and
    3 n rank^2 others, are then at most the n^3 / 3 of a Cholesky factorisation.
    """
    return max(1, min(n // 2, max(64, n // 10), 512))


#: The most rows of a sparse matrix whose columns are cheap.
FEW_ROWS_OF_SPARSE = 4096


def knows_entries(operator: lx.AbstractLinearOperator) -> bool:
    """Whether columns cost less than products, as of dense matrices, kernels, small sparse ones."""
    return has_entries(operator, sparse=operator.in_size() <= FEW_ROWS_OF_SPARSE)


@final
class KernelPreconditioner(AbstractPreconditioner):
    r"""Low rank plus a sparse inverse factor of the rest, for operators that know their entries:
    kernels, stored matrices, their sums, multiples and diagonal scalings, plus any noise.

    $P = F F^* + (L L^*)^{-1}$: F from a randomly pivoted partial Cholesky factorisation, and L from
    the entries of each point and of the `neighbours` points, among those before it in a scattered
    order, that correlate most with it beyond F. P fits rough kernels and many dimensions, too.
    Cost: no product; two passes over the entries, by columns; `n x (rank + neighbours)` numbers;
    `n^2 rank` operations.

    **Arguments:**

    - `rank`: the largest rank of F. By default it follows from the number n of rows: n / 10, from
        64 to 512.
    - `neighbours`: the number of neighbours, by default 24.

    **Source:** F. Schaefer, M. Katzfuss, H. Owhadi, 2020, arXiv:2004.14455; T. Gyger, R. Furrer,
    F. Sigrist, 2025, arXiv:2507.05064.
    """

    rank: int | None = eqx.field(default=None, static=True, converter=_checked_rank)
    neighbours: int | None = eqx.field(default=None, static=True, converter=_checked_neighbours)

    def check(self, operator):
        """See `AbstractPreconditioner`."""
        if not knows_entries(operator):
            raise ValueError(
                "KernelPreconditioner needs entries that cost less than products, which this "
                f"{type(operator).__name__} does not have. Use NystromPreconditioner()."
            )

    def prepared(self, key, operator, k):
        """See `AbstractPreconditioner`: columns cost no product."""
        n = operator.in_size()
        rank = min(self.rank or default_rank(n), n)
        built, read = prepare(key, operator, rank, self.neighbours or 24)
        return built, 0, {"columns": read}, None

    def of_rank(self, key, operator, rank):
        """See `AbstractPreconditioner`."""
        return prepare(key, operator, rank, self.neighbours or 24)[0]
