"""The trace of an operator that changes from step to step: `tracker`, and what one `step` does.

Begin with `tracker`. This room uses `_trace` and all below it.
"""
