"""Dense numerics of tall blocks and small matrices: `factorisations` (all calls into LAPACK),
products with stored matrices (`matrix_product`), Lanczos' recurrence with its quadrature
(`lanczos`), Arnoldi's (`arnoldi`) with functions of small matrices (`diagonalisation`), and, in
`sharded`, what devices do with rows of their own.

Begin with `factorisations`. This room uses `_core` and `_probes`.
"""
