"""Functions of a matrix by Lanczos' recurrence (`funm`): spectral sums, densities and counts of
eigenvalues (`spectral`), with the error of ending a recurrence early (`quadrature_error`). Extreme
eigenvalues and their vectors (`eigenpairs`), by a recurrence with restarts (`thick_restart`).

Begin with `funm`. This room uses `_estimators` and all below it.
"""
