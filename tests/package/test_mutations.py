"""The mistakes that `python -m tests.mutations` makes can still be made."""

import pytest

from ..mutations import MUTATIONS, ROOT


def test_no_two_are_the_same():
    assert len({(mutation.file, mutation.old) for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks)
def test_each_stands_where_it_is_said_to(mutation):
    """The text stands once in its file, what takes its place still is Python, and tests exist."""
    compile(mutation.mutated((ROOT / mutation.file).read_text()), mutation.file, "exec")
    assert all((ROOT / name).exists() for name in mutation.tests.split())
