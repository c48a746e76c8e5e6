"""Estimators of traces and diagonals, one algorithm a file: `hutchinson`, `hutchpp`, `xtrace`,
`xnystrace`; `auto`, the choice among them, and exact values.

`estimator` has the contract and the checks in front of every call, `trace` and `norms` the public
functions, `tolerance` what stops when the error is small enough, `calibration` and `solution` error
bars and results. Begin with `estimator`, then `xtrace`. This room uses `_core`, `_probes`,
`_linalg`, `_operators` and `_sketch`.
"""
