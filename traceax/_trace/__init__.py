"""Traces: `traceax.trace`, one algorithm a file, and the default that chooses among them (`auto`).

Begin with `hutchinson`, the shortest, then `xtrace`. This room uses `_tolerance` and all below it.
"""
