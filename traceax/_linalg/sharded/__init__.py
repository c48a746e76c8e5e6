"""Arrays whose rows live on several devices: the product of a matrix and a block, and QR
factorisations of tall blocks (TSQR), with what each device does with its rows.
"""
