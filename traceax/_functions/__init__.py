"""Functions of a matrix by Lanczos' recurrence (`funm`): spectral sums, densities and counts of
eigenvalues (`spectral`), diagonals (`diagonal`), norms (`schatten`), with the error of ending a
recurrence early (`quadrature_error`), and with what a Krylov space knows taken out
(`krylov_aware`). Spectral sums of operators that are not Hermitian, by Arnoldi's recurrence
(`non_hermitian`). Functions at Ritz values and their divided differences (`nodes`), and derivatives
by them (`frechet`). Extreme eigenvalues and their vectors (`eigenpairs`), with
bounds on the spectrum (`extremes`).

Begin with `funm`. This room uses `_estimators` and all below it.
"""
