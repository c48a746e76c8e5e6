"""Diagonals, sums of their entries, norms of rows, and the `summary`: one algorithm a file, and
the default that chooses among them (`auto`).

Begin with `hutchinson`, then `xdiag`. This room uses `_trace` and all below it, but `_functions`.
"""
