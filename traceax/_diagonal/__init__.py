"""Diagonals, sums of their entries, and norms of rows: one algorithm a file, and the default that
chooses among them (`auto`).

Begin with `hutchinson`, then `xdiag`. This room uses `_trace` and all below it, but `_functions`.
"""
