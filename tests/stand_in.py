"""Objects that tests give to code in place of those that need vLLM, a device or a hub."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Anything = Any
else:
    Anything = object
"""The base of a class whose objects type checkers accept as objects of any type.

It is no ``Any`` when tests run, because Python 3.11 creates no objects of its subclasses that take arguments.
"""


class StandIn(SimpleNamespace, Anything):
    """A namespace of the attributes that the code reads."""
