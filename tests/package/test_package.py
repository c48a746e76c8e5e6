"""The package as a whole: what it imports, how it is laid out, and that it is documented."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import types
from pathlib import Path

import equinox as eqx
import pytest

import traceax as tr

from ..helpers import ROOT, output_of

SOURCES = sorted((ROOT / "traceax").rglob("*.py"))
INTERNAL = ("jax.extend", "jax.interpreters", "equinox.internal", "jax._src")


def modules():
    names = [m.name for m in pkgutil.walk_packages(tr.__path__, "traceax.")]
    return [tr, *(importlib.import_module(n) for n in names if not n.endswith("__main__"))]


def package_classes():
    """Every class that is defined in the package."""
    found = {}
    for module in modules():
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                found[value.__module__ + "." + value.__qualname__] = value
    return found


PUBLIC = {
    name: value
    for name, value in vars(tr).items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
}
CLASSES = package_classes()


# --- the source ----------------------------------------------------------------------------------


def test_only_the_primitive_touches_internal_namespaces():
    """Imports, not remarks: a docstring may say what is not touched."""
    seen = {}
    for path in SOURCES:
        text = path.read_text()
        for name in INTERNAL:
            module, _, last = name.rpartition(".")
            imports = rf"^\s*(from|import)\s+{re.escape(name)}\b"
            from_parent = rf"^\s*from\s+{re.escape(module)}\s+import\s.*\b{re.escape(last)}\b"
            used = rf"\b{re.escape(name)}\.\w"
            if re.search(f"{imports}|{from_parent}|{used}", text, re.MULTILINE):
                seen.setdefault(path.name, set()).add(name)
    assert set(seen) == {"primitive.py"}, seen
    assert "jax._src" not in seen["primitive.py"]


def test_no_concrete_module_is_subclassed():
    """Abstract or final: a concrete class has no subclass, and says so."""
    checked = 0
    for name, cls in CLASSES.items():
        if not issubclass(cls, eqx.Module):
            continue
        for base in cls.__mro__[1:]:
            if base.__module__.startswith("traceax"):
                assert inspect.isabstract(base), f"{name} subclasses the concrete {base.__name__}"
        if not inspect.isabstract(cls):
            checked += 1
            assert getattr(cls, "__final__", False), f"{name} is concrete, but not @final"
    assert checked >= 12


# --- documentation -------------------------------------------------------------------------------


def documented(docstring):
    """The names in the list under **Arguments:**, or None without such a list."""
    if docstring is None or "**Arguments:**" not in docstring:
        return None
    section = docstring.split("**Arguments:**")[1]
    if not section.startswith("\n"):  # `**Arguments:** none.`, or a reference in words
        return None
    section = re.split(r"\n\s*\*\*[A-Z]", section)[0]
    names = []
    for line in re.findall(r"^\s*- ((?:`\*{0,2}\w+`(?:, )?)+):", section, re.MULTILINE):
        names += re.findall(r"`\*{0,2}(\w+)`", line)
    return names


def arguments(function):
    names = list(inspect.signature(function).parameters)
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def package_functions():
    """Every function and method that is written in the package."""
    for module in modules():
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                yield f"{module.__name__}.{name}", value
    for name, cls in CLASSES.items():
        for attribute, value in vars(cls).items():
            value = inspect.unwrap(getattr(value, "method", value))  # equinox wraps methods
            if inspect.isfunction(value):
                yield f"{name}.{attribute}", value


def test_lists_of_arguments_match_the_signatures():
    checked = 0
    for name, function in package_functions():
        names = documented(function.__doc__)
        if names is None:
            continue
        checked += 1
        # In any order: related arguments are described together.
        assert sorted(names) == sorted(arguments(function)), name
    assert checked >= 25


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if callable(value)])
def test_public_names_are_documented(name):
    """With their arguments, or those of another function by reference; and public methods."""
    value = PUBLIC[name]
    text = inspect.getdoc(value)
    assert len(text) > 40
    assert text[0].isupper()
    if inspect.isabstract(value) or name == "RESULTS":
        return
    if inspect.isclass(value):
        methods = [x for x in vars(value) if x[0] != "_" and callable(getattr(value, x))]
        assert all(inspect.getdoc(getattr(value, method)) for method in methods)
        value = value.__init__
        if name == "Solution":  # made by the package, not by users
            text = text.replace("**Attributes:**", "**Arguments:**")
        text += value.__doc__ or ""
    other = re.search(r"\*\*Arguments:\*\* as \[`traceax\.(\w+)`\]", text)
    described = arguments(PUBLIC[other[1]]) if other else documented(text)
    assert sorted(described) == sorted(arguments(value))


def test_the_api_page_names_what_is_public_and_nothing_else():
    text = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in PUBLIC if f"traceax.{name}" not in text] == []
    for name in re.findall(r"\btraceax\.([A-Za-z]\w*)", text):
        assert hasattr(tr, name) or importlib.util.find_spec(f"traceax.{name}"), name


# --- import and version --------------------------------------------------------------------------

# Those of the second line are a tenth of the import time, and needed by few calls.
FORBIDDEN = {
    *("matplotlib", "scipy.sparse", "scipy.io", "scipy.stats", "pytest", "pandas"),
    *("jax.scipy", "jax.experimental.sparse"),
}
ALLOWED = {*("traceax", "jax", "jaxlib", "numpy", "scipy"), *("equinox", "lineax", "jaxtyping")}


def imported_by(package):
    """The modules. Importing makes no array: that would start a device before the user chooses."""
    code = (
        f"import {package}, jax, sys\nprint(*sys.modules)\n"
        "jax.config.update('jax_platforms', 'no_such_platform')\n"
        "try:\n    jax.devices()\nexcept RuntimeError:\n    print('not-started')\n"
    )
    modules = output_of("-c", code).split()
    assert modules.pop() == "not-started"
    return set(modules)


def test_import_is_light_and_starts_no_backend():
    new = imported_by("traceax") - imported_by("lineax")
    assert "traceax" in new
    heavy = {m for m in new for f in FORBIDDEN if m == f or m.startswith(f + ".")}
    assert not heavy
    # Most of the time goes into modules, one by one (`benchmarks/bench_import.py` takes it).
    foreign = {m for m in new if m.split(".")[0] not in {"traceax", *sys.stdlib_module_names}}
    assert len(foreign) < 10, foreign
    outside = {m.split(".")[0] for m in new} - {m.split(".")[0] for m in sys.stdlib_module_names}
    assert outside <= ALLOWED


def test_the_package_that_is_tested():
    """That of this folder, or (an unpacked sdist) that of the environment with a wheel of it."""
    tested = Path(os.environ.get("TRACEAX_TESTS_PACKAGE", ROOT))
    assert Path(tr.__file__).is_relative_to(tested)


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(a|b|rc|dev)\d+)?", tr.__version__)
    assert re.search(
        rf"^## \[{re.escape(tr.__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    try:
        installed = importlib.metadata.version("traceax")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed")
    assert installed == tr.__version__


def test_package_is_typed():
    assert (ROOT / "traceax" / "py.typed").exists()


def test_every_test_that_is_named_slow_exists():
    for line in (ROOT / "tests" / "slow.txt").read_text().splitlines():
        file, *names = line.split()
        text = (ROOT / file).read_text()
        assert all(f"def {name}(" in text for name in names), line
