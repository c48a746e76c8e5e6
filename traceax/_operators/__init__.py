"""Lineax operators: checks of arguments (`checks`), products with blocks of vectors
(`block_operator`), what tags and classes say (`tags`, `precision`), known parts
(`known_parts`), and operators that lineax lacks (`sparse`, `kernel`, `curvature`, `gram`).

Begin with `block_operator`. This room uses `_core` and `_linalg`.
"""
