"""Options of plugins: checked field by field, so that an error can name the field and its value."""

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from blendhub.core.errors import OptionError

T = TypeVar("T", bound=msgspec.Struct)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` when a valid name is close, else an empty string."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def parse_options(owner: str, options: type[T], given: Mapping[str, Any] | None) -> T:
    """Convert options of a configuration; raises OptionError naming ``owner`` and every mistake."""
    mistakes = mistakes_in(owner, options, given)
    if mistakes:
        raise OptionError("; also: ".join(mistakes))
    return msgspec.convert(dict(given or {}), options)


def mistakes_in(owner: str, options: type[msgspec.Struct], given: Any) -> list[str]:
    """Every mistake in options of a configuration, a sentence each."""
    if given is not None and not isinstance(given, Mapping):
        return [f"{owner}: options must be a mapping of names to values, got {given!r}"]
    found = list(_in_struct(owner, options, given or {}))
    if not found:
        try:
            msgspec.convert(dict(given or {}), options)
        except msgspec.ValidationError as error:
            found.append(f"{owner}: options {given!r} do not fit together: {error}")
    return found


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """The fields by name, cached: msgspec evaluates all annotations, and every new cache_salt makes matchers."""
    return {field.encode_name: field for field in msgspec.structs.fields(struct)}


def _in_struct(owner: str, struct: type[msgspec.Struct], given: Mapping[Any, Any]) -> Iterator[str]:
    fields = _fields(struct)
    for name, value in given.items():
        if name not in fields:
            allowed = ", ".join(sorted(fields)) or "none"
            yield f"{owner} has no option {name!r}{did_you_mean(str(name), fields)}; its options are: {allowed}"
            continue
        expected = inspect.type_info(fields[name].type)
        inside = list(_inside(f"{owner}.{name}", expected, value))
        yield from inside or _misfit(f"{owner}: option {name}", fields[name].type, expected, value)
    for name, field in fields.items():
        if field.required and name not in given:
            yield f"{owner} needs the option {name!r}"


def _inside(owner: str, expected: inspect.Type, given: Any) -> Iterator[str]:
    """The mistakes within a value that is a struct."""
    if isinstance(expected, inspect.Metadata):
        yield from _inside(owner, expected.type, given)
    elif isinstance(expected, inspect.UnionType):
        for one in expected.types:
            yield from _inside(owner, one, given)
    elif isinstance(expected, inspect.VarTupleType | inspect.ListType) and isinstance(given, list | tuple):
        for number, item in enumerate(given):
            item_type = expected.item_type
            if isinstance(item_type, inspect.StructType) and not isinstance(item, Mapping):
                yield from _misfit(f"{owner}[{number}]", item_type.cls, item_type, item)
            else:
                yield from _inside(f"{owner}[{number}]", item_type, item)
    elif isinstance(expected, inspect.StructType) and isinstance(given, Mapping):
        yield from _in_struct(owner, expected.cls, given)


def _misfit(what: str, wanted: Any, expected: inspect.Type, value: Any) -> Iterator[str]:
    try:
        msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        allowed = _allowed(expected)
        choice = f"; it can be {', '.join(map(repr, allowed))}{did_you_mean(str(value), allowed)}" if allowed else ""
        yield f"{what} = {value!r} is not valid: {error}{choice}"


def _allowed(expected: inspect.Type) -> list[str]:
    """The words that are allowed; none if another type is expected."""
    if isinstance(expected, inspect.Metadata):
        return _allowed(expected.type)
    if isinstance(expected, inspect.UnionType):
        return [word for one in expected.types for word in _allowed(one)]
    return [str(word) for word in expected.values] if isinstance(expected, inspect.LiteralType) else []


def describe_options(options: type[msgspec.Struct]) -> list[dict[str, Any]]:
    """Name, type, bounds, default and description of every option, as plain data."""
    schema = msgspec.json.schema(options)
    properties = schema["$defs"][options.__name__]["properties"]
    rows = []
    for name, facts in properties.items():
        facts = dict(facts)
        rows.append(
            {
                "name": name,
                "type": _type_name(facts),
                "default": facts.pop("default", None),
                "description": facts.pop("description", ""),
                "bounds": {key: facts[key] for key in sorted(facts) if key in _BOUNDS},
            }
        )
    return rows


_BOUNDS = {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "minItems", "maxItems", "pattern", "enum",
}  # fmt: skip


def _type_name(facts: dict[str, Any]) -> str:
    if "anyOf" in facts:
        return " or ".join(_type_name(one) for one in facts["anyOf"])
    if "enum" in facts:
        return " or ".join(repr(one) for one in facts["enum"])
    if facts.get("type") == "array" and isinstance(facts.get("items"), dict):
        return f"array of {_type_name(facts['items'])}"
    return str(facts.get("type", "any"))
