"""What all estimators have in common: the abstract classes and the checks of a call (`estimator`,
`arguments`), exact values (`exact`), algorithms that can be extended by further probes
(`extendable`) or averaged over blocks (`block_means`), the choice of the default (`auto`), error
bars (`calibration`) and the `solution`.

Begin with `estimator`. This room uses `_core`, `_probes`, `_linalg`, `_operators` and `_sketch`.
"""
