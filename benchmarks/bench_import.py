"""The time that `import traceax` takes, over that of `import lineax`.

    python -m pytest benchmarks/bench_import.py --benchmark-only

Fresh interpreters, in turns, with compiled bytecode. CPU time: what else the machine does falls on
it least. The ratio of medians stands in `extra_info`, and is printed.
"""

import os
import statistics
import subprocess
import sys

ROUNDS, BOUND = 21, 1.15
CODE = "import time; import {}; print(time.process_time())"
ENVIRONMENT = {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}


def seconds(module):
    command = [sys.executable, "-c", CODE.format(module)]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return float(run.stdout)


def test_import(benchmark):
    modules = "traceax", "lineax"
    for module in modules:
        seconds(module)  # writes the bytecode
    times = [[seconds(module) for module in modules] for _ in range(ROUNDS)]
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    benchmark.extra_info["ratio"] = ours / theirs
    print(f"{ours:.3f} s, lineax {theirs:.3f} s: ratio {ours / theirs:.3f}")
    benchmark.pedantic(seconds, args=("traceax",), rounds=3)
    assert ours / theirs < BOUND
