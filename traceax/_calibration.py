"""Constants."""


def multiple(growth, dof):
    return 2.0
