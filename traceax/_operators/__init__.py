"""Lineax operators: how blocks of vectors are multiplied (`block_operator`, `width`), what is
known of an operator without a product (`known_parts`), and operators that lineax does not
have (`sparse`, `kernel`, `curvature`).

Begin with `block_operator`. This room uses `_core` and `_linalg`.
"""
