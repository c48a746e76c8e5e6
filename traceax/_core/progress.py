"""The progress of a long run, on standard error: a bar if tqdm is installed, otherwise a line."""

import sys
from typing import Any

import jax
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, PRNGKeyArray

from .control_flow import alone

_bars: dict[tuple[int, ...], Any] = {}  # one for each run under way, found by its random key


def show(key: Any, most: Any, spent: Any, value: Any, error: Any, last: Any) -> None:
    """Show how far a run has come.

    **Arguments:**

    - `key`: the random key of the run, as data.
    - `most`: the budget of the run.
    - `spent`: the number of products so far.
    - `value`: the estimate.
    - `error`: the standard error of the estimate.
    - `last`: whether the run ends here.
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
    """Show how far a run has come, from inside a computation. Under `vmap` this does nothing.

    **Arguments:** as for `show`, but `key` is a key rather than its data.
    """

    def call():
        jax.debug.callback(show, jr.key_data(key), most, spent, value, error, last, ordered=False)

    lax.cond(alone(last), call, lambda: None)
