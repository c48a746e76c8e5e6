"""Numbers of things that a user gives."""

import numpy as np
import pytest

from traceax._core.counts import checked_count


@pytest.mark.parametrize("value", [3, np.int32(3), np.array(3)])
def test_any_integer_is_a_count(value):
    count = checked_count(value, "rank")
    assert type(count) is int
    assert count == 3


@pytest.mark.parametrize("value", [True, np.True_, 3.0, "3", 0, -1, None])
def test_anything_else_is_not(value):
    with pytest.raises(ValueError, match="rank must be an int of at least 1, got"):
        checked_count(value, "rank")


def test_none_where_it_stands_for_something():
    assert checked_count(None, "rank", none="it is chosen") is None
    with pytest.raises(ValueError, match=r"at least 2, or None \(it is chosen\), got 1"):
        checked_count(1, "rank", 2, none="it is chosen")
