"""Peak memory of one call in a process of its own: Hutchinson, batch_size=8, a function operator.

    python -m benchmarks.peak --gradient

n = 10^7, float32. Prints the peak resident memory of the call beyond what was in use right before
it (its arguments included), in vectors of n numbers, and the seconds it took.
"""

import argparse
import json
import re
import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tr

N, K, BATCH = 10_000_000, 1000, 8


def program(n, k, gradient):
    """The compiled function of a vector, the diagonal: the trace, or both it and its gradient."""
    structure = jax.ShapeDtypeStruct((n,), jnp.float32)

    def value(diagonal):
        operator = lx.FunctionLinearOperator(lambda v: diagonal * v + jnp.mean(v), structure)
        estimator = tr.HutchinsonEstimator(batch_size=BATCH)
        return tr.trace(jax.random.key(0), operator, k, estimator).value

    fn = jax.value_and_grad(value) if gradient else value
    return jax.jit(fn).lower(structure).compile()


def resident_bytes(now=False):
    """The largest resident memory of this process so far, or (on Linux) what it is `now`.

    On Linux not `ru_maxrss`: there a child starts from what its parent had when it started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        name = "VmRSS" if now else "VmHWM"
        return int(re.search(rf"{name}:\s+(\d+) kB", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on a Mac


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=N)
    parser.add_argument("--k", type=int, default=K)
    parser.add_argument("--gradient", action="store_true")
    args = parser.parse_args()
    compiled = program(args.n, args.k, args.gradient)
    diagonal = jax.block_until_ready(jnp.ones(args.n))
    before, start = resident_bytes(), time.perf_counter()
    jax.block_until_ready(compiled(diagonal))
    seconds = time.perf_counter() - start
    vectors = (resident_bytes() - before) / diagonal.nbytes
    print(json.dumps({"vectors": vectors, "seconds": seconds}))


if __name__ == "__main__":
    main()
