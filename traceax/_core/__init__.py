"""What an estimate is, and how JAX sees it.

`primitive` is where every estimate becomes a JAX primitive (it alone touches `jax.extend` and
`jax.interpreters`), and `programs` says when two calls share a compiled program. `estimate` is
what an algorithm returns: a value, its error, counts. `control_flow`, `devices` and `precision` are
what several rooms need of JAX.

Begin with `primitive`. This room uses no other.
"""
