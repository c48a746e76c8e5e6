"""How the classes are made, and what attributes are, for the pages of the reference.

Equinox writes `__init__` from the fields of a class: it does not stand in the source where
mkdocstrings looks for it, nor does a docstring of it that is assigned.
"""

import dataclasses
import inspect
from itertools import takewhile
from pathlib import Path

import griffe

import traceax
import traceax.extend


class Constructors(griffe.Extension):
    """Adds the signature and the arguments to the docstrings of public classes."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_) -> None:
        """The lines with `#:` above an attribute are its docstring."""
        if attr.docstring is None and attr.lineno and isinstance(attr.filepath, Path):
            lines = attr.filepath.read_text().splitlines()[: attr.lineno - 1]
            found = list(takewhile(lambda line: line.lstrip().startswith("#:"), reversed(lines)))
            text = "\n".join(line.lstrip()[3:] for line in reversed(found))
            attr.docstring = griffe.Docstring(text, parent=attr) if text else None

    def on_class_instance(self, *, cls: griffe.Class, **_) -> None:
        """Called for every class that is read."""
        found = vars(traceax).get(cls.name, vars(traceax.extend).get(cls.name))
        if found is None or cls.docstring is None:
            return
        arguments = inspect.getdoc(found.__init__) or ""
        # Results, which only the package makes, have attributes alone; so has what others extend.
        made_by_others = cls.name in vars(traceax.extend) and not inspect.isabstract(found)
        if "**Arguments:**" not in cls.docstring.value + arguments and not made_by_others:
            return
        listed = arguments.removeprefix("**Arguments:**").strip()
        if listed == arguments or listed in cls.docstring.value:
            arguments = ""
        parameters = [str(each) for each in _parameters(found)]
        call = f"{cls.name}({', '.join(parameters)})"
        if len(call) > 80:  # as `separate_signature` breaks those of functions
            call = "\n    ".join([f"{cls.name}(", *(f"{each}," for each in parameters)]) + "\n)"
        cls.docstring.value = f"```python\n{call}\n```\n\n{cls.docstring.value}\n\n{arguments}"


class _Call(str):
    """A default that is made for each instance, as it would be written."""

    __repr__ = str.__str__


def _parameters(cls):
    """The parameters without annotations, and with calls for what makes a default."""
    fields = getattr(cls, "__dataclass_fields__", {})
    for each in inspect.signature(cls).parameters.values():
        make = getattr(fields.get(each.name), "default_factory", dataclasses.MISSING)
        if make is not dataclasses.MISSING:
            each = each.replace(default=_Call(f"{make.__name__}()"))
        yield each.replace(annotation=each.empty)
