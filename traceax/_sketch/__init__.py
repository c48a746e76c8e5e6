"""Low rank: sketches and what is left out of them (`leave_one_out`), Nystrom's approximation
(`nystrom`), low rank plus a multiple of the identity (`low_rank`), and the matrices that an
estimate is differentiated with (`weights`).

Begin with `leave_one_out`. This room uses `_core`, `_probes`, `_linalg` and `_operators`.
"""
