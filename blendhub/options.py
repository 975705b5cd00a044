"""Options of plugins: checked field by field, so that an error can name the field and its value."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from blendhub.errors import OptionError
from blendhub.suggest import did_you_mean

T = TypeVar("T", bound=msgspec.Struct)


def parse_options(owner: str, options: type[T], given: Mapping[str, Any] | None) -> T:
    """An ``options`` struct from what a person wrote; raises OptionError naming ``owner`` and the option."""
    if given is not None and not isinstance(given, Mapping):
        raise OptionError(f"{owner}: options must be a mapping of names to values, got {given!r}")
    _check_names(owner, inspect.type_info(options), given or {})
    fields = {field.encode_name: field for field in msgspec.structs.fields(options)}
    values: dict[str, Any] = {}
    for name, value in (given or {}).items():
        try:
            values[name] = msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError as error:
            raise OptionError(f"{owner}: option {name} = {value!r} is not valid: {error}") from None
    try:
        return msgspec.convert(values, options, from_attributes=False)
    except msgspec.ValidationError as error:
        raise OptionError(f"{owner}: options {values!r} do not fit together: {error}") from None


def _check_names(owner: str, expected: inspect.Type, given: Any) -> None:
    """Raise for a name that no struct at this depth has; everything else is left to the conversion."""
    if isinstance(expected, inspect.Metadata):
        _check_names(owner, expected.type, given)
    elif isinstance(expected, inspect.UnionType):
        for one in expected.types:
            _check_names(owner, one, given)
    elif isinstance(expected, inspect.VarTupleType | inspect.ListType) and isinstance(given, list | tuple):
        for number, item in enumerate(given):
            _check_names(f"{owner}[{number}]", expected.item_type, item)
    elif isinstance(expected, inspect.StructType) and isinstance(given, Mapping):
        fields = {field.encode_name: field for field in expected.fields}
        for name, value in given.items():
            if name not in fields:
                allowed = ", ".join(sorted(fields)) or "none"
                hint = did_you_mean(str(name), fields)
                raise OptionError(f"{owner} has no option {name!r}{hint}; its options are: {allowed}")
            _check_names(f"{owner}.{name}", fields[name].type, value)


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
