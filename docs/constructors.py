"""How the classes are made, for the pages of the reference.

Equinox writes `__init__` from the fields of a class, and its docstring is assigned: neither stands
in the source where mkdocstrings looks for it.
"""

import inspect

import griffe

import traceax
import traceax.extend


class Constructors(griffe.Extension):
    """Adds the signature and the arguments to the docstrings of public classes."""

    def on_class_instance(self, *, cls: griffe.Class, **_) -> None:
        """Called for every class that is read."""
        found = vars(traceax).get(cls.name, vars(traceax.extend).get(cls.name))
        arguments = inspect.getdoc(getattr(found, "__init__", None)) or ""
        if cls.docstring is None or not arguments.startswith("**Arguments:**"):
            return
        parameters = inspect.signature(found).parameters.values()
        signature = ", ".join(str(each.replace(annotation=each.empty)) for each in parameters)
        call = f"```python\n{cls.name}({signature})\n```"
        cls.docstring.value = f"{call}\n\n{cls.docstring.value}\n\n{arguments}"
