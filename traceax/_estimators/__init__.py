"""Estimators of traces and diagonals: `hutchinson`, `hutchpp`, `xtrace` (and XNysTrace), `exact`,
and `auto`, which chooses among these.

`estimator` has the contract and the checks of a call, `trace` the public functions, `tolerance` the
calls with a tolerance, `solution` error bars and results. Begin with `estimator`, then `xtrace`.
This room uses `_core`, `_probes`, `_linalg`, `_operators` and
`_sketch`.
"""
