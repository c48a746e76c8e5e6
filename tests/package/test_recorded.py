"""The same key gives the same numbers with every version of Python and JAX that is supported."""

import inspect
import json
from functools import cache

import jax
import numpy as np
import pytest

import traceax as tr

from .. import recorded

RECORDED = json.loads(recorded.FILE.read_text())
calls = cache(recorded.calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_numbers_are_those_recorded(name):
    """`python -m tests.recorded` records them anew, where a change is meant: see the changelog.

    Also for users who refuse to promote ranks (but for a sampler that is called by itself).
    """
    with jax.numpy_rank_promotion("allow" if name.endswith(" itself") else "raise"):
        found, expected = recorded.numbers_of(calls()[name]()), RECORDED[name]
    finite = [x for x in expected if np.isfinite(x)]
    scale = max(map(abs, finite), default=0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8 * scale)


def test_every_public_function_is_recorded():
    names = {name.split()[0] for name in calls()}
    assert set(RECORDED) == set(calls())
    for name, value in vars(tr).items():
        if name.startswith("_") or inspect.ismodule(value) or not callable(value):
            continue
        if inspect.isclass(value) and (inspect.isabstract(value) or name in RESULTS):
            continue
        assert name in names, name


# What functions return, and not called by anybody; and other names of what is recorded.
RESULTS = {"Solution", "RESULTS", "TrackState"}
