"""Log-determinants, and log densities of Gaussian processes.

A budget is divided between a preconditioner (`preconditioners`) and quadrature (`log_quadrature`)
by a policy (`budget_policy`); `estimator` makes an estimate of that, and `weights` its unbiased
derivative. `inverse` has trace and diagonal of the inverse from the same budgets, and
`sampled_inverse` the diagonal for sparse matrices. `held` has the value whose own derivative is
exact (`own_derivative`). The `gaussian` modules add the solve (`conjugate_gradients`).

Begin with `budget_policy`. This room uses `_functions`, `_estimators` and all below them.
"""
