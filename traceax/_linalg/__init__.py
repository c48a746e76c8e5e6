"""Dense numerics of tall blocks and small matrices: `factorisations` (calls into LAPACK),
Lanczos' recurrence with its quadrature (`lanczos`), and Arnoldi's (`arnoldi`) with functions of
small matrices (`diagonalisation`).

Begin with `factorisations`. This room uses `_core`.
"""
