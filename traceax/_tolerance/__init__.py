"""Runs of traces and diagonals that end when they are accurate enough: the loop over blocks of
probes (`run`), and the estimator that the primitive sees (`estimator`).

Begin with `run`. This room uses those below: `_core`, `_probes`, `_operators`, `_sketch` and
`_estimators`. It knows no algorithm: every estimator defines how it works to a tolerance.
"""
