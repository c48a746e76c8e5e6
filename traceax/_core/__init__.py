"""What an estimate is, and how JAX sees it.

`primitive` makes every estimate a JAX primitive (it alone touches `jax.extend` and
`jax.interpreters`), and `programs` says when two calls share a compiled program. `estimate` is
what an algorithm returns: a value, its error, counts. Several rooms use `control_flow`, `devices`
and `precision`. Begin with `primitive`. This room uses no other.
"""
