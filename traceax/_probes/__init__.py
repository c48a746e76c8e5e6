"""Random vectors: `samplers`, from the streams of random numbers in `random`.

Begin with `samplers`. This room uses no other.
"""
