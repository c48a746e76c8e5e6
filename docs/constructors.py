"""How the classes are made, for the pages of the reference.

Equinox writes `__init__` from the fields of a class: it does not stand in the source where
mkdocstrings looks for it, nor does a docstring of it that is assigned.
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
        if found is None:
            return
        arguments = inspect.getdoc(found.__init__) or ""
        if cls.docstring is None or "**Arguments:**" not in cls.docstring.value + arguments:
            return
        listed = arguments.removeprefix("**Arguments:**").strip()
        if listed == arguments or listed in cls.docstring.value:
            arguments = ""
        parameters = inspect.signature(found).parameters.values()
        signature = ", ".join(str(each.replace(annotation=each.empty)) for each in parameters)
        call = f"```python\n{cls.name}({signature})\n```"
        cls.docstring.value = f"{call}\n\n{cls.docstring.value}\n\n{arguments}"
