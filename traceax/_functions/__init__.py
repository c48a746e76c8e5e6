"""Functions of a matrix by Lanczos' recurrence (`funm`): spectral sums, densities, counts and norms
(`spectral`), with what a Krylov space knows taken out (`krylov_aware`), and of operators that are
not Hermitian (`non_hermitian`); diagonals (`diagonal`); sums and diagonals to a tolerance
(`tolerance`); the error of ending a recurrence early (`quadrature_error`); values, divided
differences and derivatives at Ritz values (`nodes`); extreme eigenvalues and their vectors
(`eigenpairs`).

Begin with `funm`. This room uses `_estimators` and all below it.
"""
