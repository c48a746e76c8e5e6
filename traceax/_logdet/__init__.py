"""Log-determinants, and log densities of Gaussian processes.

Every call prepares a preconditioner (`preparation`: from entries, `sparse_factor`, or from
products), and then draws panels of probes (`panels`) until the budget is spent or a tolerance is
met: `run`.
`logdet`, `gaussian_estimator` and `inverse` make estimates of that, and `weights` their unbiased
derivatives. `sampled_inverse` has the diagonal of the inverse for sparse matrices, `held` the value
whose own derivative is exact (`own_derivative`).

Begin with `run`. This room uses `_functions`, `_estimators` and all below them.
"""
