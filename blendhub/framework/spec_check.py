"""Checks a plugin's spec before it is used."""

import re
from typing import Any

import msgspec

from blendhub.framework.hookspecs import PluginSpec
from blendhub.framework.options import describe_options

FACTORY_NAME = re.compile(r"(?!\d)\w+(\.(?!\d)\w+)*:(?!\d)\w+")


def fault_of(spec: PluginSpec[Any]) -> str | None:
    """The first fault of a spec, in a sentence that says what belongs there; None if it is sound.

    A Struct does not check the types of its fields, and a fault that is not found here would surface far away, as an
    error of other code.
    """
    expected: tuple[tuple[str, bool, str], ...] = (
        ("name", isinstance(spec.name, str) and bool(spec.name), "a string that is not empty"),
        ("api", type(spec.api) is int, "an integer"),
        ("summary", isinstance(spec.summary, str), "a string"),
        ("factory", _is_factory(spec.factory), "something to call with the options, or its name as 'module:Class'"),
        ("options", _is_struct(spec.options), "a subclass of msgspec.Struct"),
        ("capabilities", _are_words(spec.capabilities), "a tuple of strings"),
        ("probe", callable(spec.probe), "something to call without arguments"),
        ("details", callable(spec.details), "something to call without arguments"),
    )
    for field, sound, wanted in expected:
        if not sound:
            return f"its PluginSpec has {field} = {getattr(spec, field)!r}, which should be {wanted}"
    return _fault_of_options(spec.options)


def _fault_of_options(options: type[msgspec.Struct]) -> str | None:
    required = [field.encode_name for field in msgspec.structs.fields(options) if field.required]
    if required:
        return f"its options {options.__name__} need a default for every field, but have none for {', '.join(required)}"
    try:
        describe_options(options)
    except Exception as error:  # any type may stand there: what msgspec raises about it is the fault
        return f"its options {options.__name__} cannot be described: {type(error).__name__}: {error}"
    return None


def _is_factory(factory: Any) -> bool:
    return callable(factory) or (isinstance(factory, str) and FACTORY_NAME.fullmatch(factory) is not None)


def _is_struct(options: Any) -> bool:
    return isinstance(options, type) and issubclass(options, msgspec.Struct)


def _are_words(capabilities: Any) -> bool:
    return isinstance(capabilities, tuple) and all(isinstance(word, str) for word in capabilities)
