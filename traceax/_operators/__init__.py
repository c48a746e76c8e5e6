"""Lineax operators: the checks of what users pass (`checks`, `hoisting`), how blocks of vectors are
multiplied (`block_operator`, `width`), what tags and classes say of an operator (`tags`,
`questions`), what is known of it without a product (`known_parts`), and operators that lineax does
not have (`sparse`, `kernel`, `curvature`, `gram`).

Begin with `block_operator`. This room uses `_core` and `_linalg`.
"""
