"""What lineax is told of the operators that have no structure but symmetry and a sign."""

import lineax as lx


def register_unstructured(kind: type[lx.AbstractLinearOperator]) -> None:
    """Answer no to whether operators of this class are triangular, diagonal or negative."""
    for check in (
        lx.has_unit_diagonal,
        lx.is_diagonal,
        lx.is_tridiagonal,
        lx.is_lower_triangular,
        lx.is_upper_triangular,
        lx.is_negative_semidefinite,
    ):
        check.register(kind)(lambda operator: False)
