"""QR factorisations of tall blocks whose rows live on several devices (`tsqr`), and what each of
the devices does with its rows (`devices`).
"""
