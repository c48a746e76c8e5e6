"""Matfree's estimators with the arguments of ours."""

from collections.abc import Callable
from typing import Any

from matfree import decomp, funm, stochtrace

#: By the names of `common.ESTIMATORS`.
INTEGRANDS = {
    "hutchinson": stochtrace.monte_carlo_trace,
    "xtrace": stochtrace.leave_one_out_xtrace,
    "xnystrace": stochtrace.leave_one_out_xnystrace,
}


def trace(name: str, like: Any, k: int, with_error: bool = False) -> Callable[..., Any]:
    """An estimator from k products, `(matvec, key, *parameters) -> value`.

    **Arguments:**

    - `name`: one of `INTEGRANDS`.
    - `like`: a vector.
    - `k`: the number of products.
    - `with_error`: whether to return value and standard error.
    """
    one_by_one = name == "hutchinson"
    sampler = stochtrace.sampler_signs if one_by_one else stochtrace.sampler_sphere
    probes = sampler(like, num=k // 2 if name == "xtrace" else k)
    kind = "monte_carlo" if one_by_one else "leave_one_out"
    suffix = "_mean_and_sem" if with_error else ""
    return getattr(stochtrace, f"estimator_{kind}{suffix}")(INTEGRANDS[name](), probes)


def logdet(like: Any, k: int, steps: int, with_error: bool = False) -> Callable[..., Any]:
    """Stochastic Lanczos quadrature with so many steps for each probe."""
    integrand = funm.monte_carlo_funm_sym_logdet(decomp.tridiag_sym(steps))
    suffix = "_mean_and_sem" if with_error else ""
    estimator = getattr(stochtrace, f"estimator_monte_carlo{suffix}")
    return estimator(integrand, stochtrace.sampler_signs(like, num=k // steps))


def function(fn: Callable[..., Any], like: Any, k: int, steps: int) -> Callable[..., Any]:
    """Stochastic Lanczos quadrature of tr f(A), with so many steps for each probe."""
    dense = funm.dense_funm_sym_eigh(fn)
    integrand = funm.monte_carlo_funm_sym(dense, decomp.tridiag_sym(steps))
    probes = stochtrace.sampler_signs(like, num=k // steps)
    return stochtrace.estimator_monte_carlo(integrand, probes)


def exponential(like: Any, k: int, steps: int) -> Callable[..., Any]:
    """The trace of exp(A), A not symmetric, by so many steps of Arnoldi's recurrence a probe."""
    arnoldi = decomp.hessenberg(steps, reortho="full")
    product = funm.funm_arnoldi(funm.dense_funm_pade_exp(), arnoldi)
    integrand = stochtrace.monte_carlo_trace()
    estimate = stochtrace.estimator_monte_carlo(
        integrand, stochtrace.sampler_signs(like, num=k // steps)
    )
    return lambda mv, key: estimate(lambda v: product(mv, v), key)
