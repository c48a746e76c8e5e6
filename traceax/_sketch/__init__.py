"""Low rank: sketches and what is left out of them (`leave_one_out`, `shrunk`), Nystrom's
approximation (`nystrom`, `low_rank`), randomly pivoted Cholesky factorisation
(`pivoted_cholesky`), and the matrices that an estimate is differentiated with (`weights`).

Begin with `leave_one_out`. This room uses `_core`, `_probes`, `_linalg` and `_operators`.
"""
