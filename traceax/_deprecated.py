"""Names of earlier versions, each with what took its place."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ._sequences.tracker import Tracker

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _renamed(name: str, function: Callable[_P, _T], successor: str) -> Callable[_P, _T]:
    """The function under its old name, with a `DeprecationWarning` that gives the new one."""

    @wraps(function)
    def renamed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        message = f"traceax.{name} is deprecated: use traceax.{successor}, which takes the same."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    renamed.__name__ = renamed.__qualname__ = name
    renamed.__doc__ = (
        f"Deprecated: use [`traceax.{successor}`][].\n\n"
        f"**Arguments:** as [`traceax.{successor}`][]."
    )
    return renamed


track = _renamed("track", Tracker, "Tracker")
