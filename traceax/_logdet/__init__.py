"""Log-determinants, and log densities of Gaussian processes.

A call prepares a preconditioner (`preparation`: from entries, `sparse_factor`, or from products,
`sketch`; both have `factors`), and draws panels of probes (`panels`) until the budget is spent or
a tolerance is met: `run`. `logdet`, `gaussian` and `inverse` make estimates of the sums
over panels, `weights` makes unbiased derivatives. `sampled_inverse` has the diagonal of the inverse
for sparse matrices, `held` values whose own derivatives are exact (`own_derivative`).

Begin with `run`. This room uses `_functions`, `_estimators` and all below them.
"""
