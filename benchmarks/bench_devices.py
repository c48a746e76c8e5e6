"""What the devices send each other: collectives in the compiled programs, at 2, 4 and 8 devices.

`python -m benchmarks.bench_devices`. The operator is diagonal and sends nothing itself; every
device has the same number of rows, so that a column that does not grow is one that scales.
"""

import os
import re

COUNTS = (2, 4, 8)
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={max(COUNTS)}")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import lineax as lx  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P  # noqa: E402

import traceax as tr  # noqa: E402

ROWS, K = 8192, 48
SIZES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}
ESTIMATORS = {
    "Hutchinson": (tr.trace, tr.HutchinsonEstimator()),
    "Hutch++": (tr.trace, tr.HutchPlusPlusEstimator()),
    "XTrace": (tr.trace, tr.XTraceEstimator()),
    "XNysTrace": (tr.trace, tr.XNysTraceEstimator()),
    "HutchinsonDiagonal": (tr.diagonal, tr.HutchinsonEstimator()),
    "XDiag": (tr.diagonal, tr.XTraceEstimator()),
    "XNysDiag": (tr.diagonal, tr.XNysTraceEstimator()),
    "logdet": (tr.logdet, None),
}
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collectives(text: str) -> list[tuple[str, int]]:
    """Name and bytes of the result of every collective in a compiled program."""
    found = []
    for shapes, name in COLLECTIVE.findall(text):
        size = 0
        for dtype, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            numbers = [int(x) for x in dimensions.split(",") if x]
            size += SIZES[dtype] * int(np.prod(numbers))
        found.append((name, size))
    return found


def program(count: int, name: str, gradient: bool) -> str:
    """The compiled text of an estimate on so many devices."""
    mesh = jax.make_mesh((count,), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("d"))
    diagonal = jax.ShapeDtypeStruct((ROWS * count,), jnp.float32, sharding=sharding)
    estimate, estimator = ESTIMATORS[name]

    def value(diagonal):
        structure = jax.ShapeDtypeStruct(diagonal.shape, diagonal.dtype)
        operator = lx.FunctionLinearOperator(
            lambda v: diagonal * v, structure, lx.positive_semidefinite_tag
        )
        more = () if estimator is None else (estimator,)
        return estimate(jax.random.key(0), operator, K, *more).value

    fn = jax.grad(value) if gradient else value
    return jax.jit(fn).lower(diagonal).compile().as_text()


def main():
    """Print the table."""
    for name, (estimate, _) in ESTIMATORS.items():
        for gradient in (False, True) if estimate is tr.trace else (False,):
            cells = []
            for count in COUNTS:
                found = collectives(program(count, name, gradient))
                kinds = sorted({kind for kind, _ in found})
                numbers = [sum(kind == each for each, _ in found) for kind in kinds]
                sizes = [sum(size for each, size in found if each == kind) for kind in kinds]
                of_all = zip(kinds, numbers, sizes, strict=True)
                cells.append(", ".join(f"{n} {kind} {size / 1024:.1f}" for kind, n, size in of_all))
            print(name, "gradient" if gradient else "value", *cells, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
