"""The progress of a long run on standard error: a tqdm bar if there is one, else a line."""

import sys
from typing import Any

import jax
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, PRNGKeyArray

from .control_flow import alone

_bars: dict[tuple[int, ...], Any] = {}  # of the runs that are under way, by their keys


def show(key: Any, most: Any, spent: Any, value: Any, error: Any, last: Any) -> None:
    """Show how far a run is.

    **Arguments:**

    - `key`: its random key, as data.
    - `most`: its budget.
    - `spent`: the products so far.
    - `value`: the estimate.
    - `error`: its standard error.
    - `last`: whether this is the end.
    """
    text = f"{complex(value):.8g}" if complex(value).imag else f"{complex(value).real:.8g}"
    text += f" +- {float(error):.2g}"
    try:
        from tqdm import tqdm  # pyright: ignore
    except ImportError:
        end = "\n" if last else ""
        sys.stderr.write(f"\r{int(spent)} of at most {int(most)} products: {text}\x1b[K{end}")
        sys.stderr.flush()
        return
    run = tuple(np.asarray(key).reshape(-1).tolist())
    if run not in _bars:
        _bars[run] = tqdm(total=int(most), unit="product", leave=True)
    bar = _bars[run]
    bar.n = int(spent)
    bar.set_postfix_str(text)
    if last:
        _bars.pop(run).close()


def report(
    key: PRNGKeyArray, most: int, spent: Array, value: Array, error: Array, last: Array
) -> None:
    """Show how far a run is, from inside of a computation; not under `vmap`.

    **Arguments:** as for `show`; the key is one.
    """

    def call():
        jax.debug.callback(show, jr.key_data(key), most, spent, value, error, last, ordered=False)

    lax.cond(alone(last), call, lambda: None)
