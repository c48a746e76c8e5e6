"""Every test runs in float64 and with strict dtype promotion."""

import collections
import os

# Before NumPy loads it: pytest-xdist runs one process a core, and the threads of several OpenBLAS
# pools that wait for each other cost more than everything else (seven times on two cores).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import time
from pathlib import Path

import jax
import pytest

# Two batched factorisations at once can wait for each other forever before jaxlib 0.11.1, but not
# with one thread (docs/errors.md).
if jax.__version_info__ < (0, 11, 1):
    os.environ.setdefault("NPROC", "1")

# What one worker compiles, or one test, or an earlier run, is loaded. Workers inherit the folder.
if "TRACEAX_TESTS_COMPILED" not in os.environ:
    compiled = Path(__file__).parent.parent / ".pytest_cache" / "xla"
    compiled.mkdir(parents=True, exist_ok=True)
    os.environ["TRACEAX_TESTS_COMPILED"] = str(compiled)
    for program in compiled.iterdir():  # of code that has changed, for the most part
        if program.stat().st_mtime < time.time() - 7 * 24 * 3600:
            program.unlink(missing_ok=True)
# XLA's older code generator for CPUs, which jaxlib 0.12 lacks, compiles in a third of the time.
# With XLA_FLAGS in the environment, an empty one too, it is left to choose.
if jax.__version_info__ < (0, 12):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
jax.config.update("jax_compilation_cache_dir", os.environ["TRACEAX_TESTS_COMPILED"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# The tests' own products: on a GPU the default is TF32.
if jax.default_backend() != "cpu":
    jax.config.update("jax_default_matmul_precision", "highest")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file goes to one worker, so that no two compile its programs. Pages and notebooks have
    processes of their own.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            apart = nodeid.startswith(("tests/package/test_docs", "tests/package/test_notebooks"))
            return nodeid if apart else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


# A line for each file, and the names of its tests that compile many programs.
MANY = [line.split() for line in (Path(__file__).parent / "slow.txt").read_text().splitlines()]
SLOW = {(file, name) for file, *names in MANY for name in names}


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    """The tests of `slow.txt` are slow, too. The files with the most code to run come first, so
    that all workers end at the same time.
    """
    for item in items:
        if (item.nodeid.partition("::")[0], item.originalname) in SLOW:
            item.add_marker(pytest.mark.slow(quick=True))
    yield
    cost = collections.Counter()
    for item in items:
        cost[item.path] += len(item.function.__code__.co_code)
    items.sort(key=lambda item: (-cost[item.path], item.path))


@pytest.fixture(autouse=True)
def _compile_quickly(request):
    """Most tests compile for longer than they compute: they do without the expensive passes (40 %
    less time in all), unless they are marked slow without `quick=True`: those are optimised as for
    users (and wholly compiled as for them with an empty XLA_FLAGS).
    """
    slow = request.node.get_closest_marker("slow")
    quick = slow is None or slow.kwargs.get("quick", False)
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# --- compiled programs ----------------------------------------------------------------------------

# The README's command compiles no more, all workers together. (A program takes a CPU second, and
# 20 ms if it is a single operation: references and inputs are computed by NumPy.)
MOST_PROGRAMS = 300
PROGRAMS = collections.Counter()  # by the folder or file of the tests that ask for them
ASKING = ["imports"]


def _count(event, duration, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        PROGRAMS[ASKING[0]] += 1


jax.monitoring.register_event_duration_secs_listener(_count)


def pytest_runtest_logstart(nodeid, location):
    ASKING[0] = nodeid.partition("::")[0]


@pytest.fixture(scope="module", autouse=True)
def _forget_many_programs():
    """A process may have 65,530 memory maps, and an optimised program takes some 130 of them."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    found = getattr(node, "workeroutput", {}).get("programs", {})
    imports = max(PROGRAMS["imports"], found.pop("imports", 0))  # the same in all workers
    PROGRAMS.update(found)
    PROGRAMS["imports"] = imports


def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["programs"] = dict(PROGRAMS)
    is_whole = config.args_source == config.ArgsSource.TESTPATHS and not config.option.keyword
    is_default = is_whole and config.option.markexpr == "not slow"
    if is_default and PROGRAMS.total() > MOST_PROGRAMS and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    most = ", ".join(f"{name} {count}" for name, count in PROGRAMS.most_common(5))
    text = f"compiled programs: {PROGRAMS.total()} (at most {MOST_PROGRAMS}); {most}"
    terminalreporter.write_line(text)
