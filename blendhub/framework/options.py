"""Options of plugins and settings: msgspec checks them, and an error names the key's path."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from blendhub.core.errors import OptionError

__all__ = ["parse_options"]
"""What plugins import."""

T = TypeVar("T", bound=msgspec.Struct)
WRONG_WORD = re.compile(r"Object contains unknown field `(.*?)`|Invalid enum value '(.*?)'")


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` when a valid name is close, else an empty string."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def parse_options(owner: str, options: type[T], values: Mapping[str, Any] | None) -> T:
    """Convert options of a configuration; raises OptionError that names ``owner`` and the path of a mistake."""
    if values is not None and not isinstance(values, Mapping):
        raise OptionError(f"{owner}: Expected a mapping of names to values, got {values!r}")
    try:
        return msgspec.convert(dict(values or {}), options)
    except msgspec.ValidationError as error:
        wrong = WRONG_WORD.match(str(error))
        hint = did_you_mean(wrong[1] or wrong[2], _words(msgspec.json.schema(options))) if wrong else ""
        raise OptionError(f"{owner}: {error}{hint}") from None


def _words(schema: Any) -> Iterator[str]:
    """The names and the words to choose from that a schema has anywhere."""
    if isinstance(schema, Mapping):
        yield from schema.get("properties", ())
        yield from (word for word in schema.get("enum", ()) if isinstance(word, str))
    for part in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        yield from _words(part)


def describe_options(options: type[msgspec.Struct]) -> list[dict[str, Any]]:
    """Name, type, bounds, default and description of every option, as plain data."""
    schema = msgspec.json.schema(options)
    properties = schema["$defs"][options.__name__]["properties"]
    return [
        {
            "name": name,
            "type": _type_name(facts),
            "default": facts.get("default"),
            "description": facts.get("description", ""),
            "bounds": {
                key: kind[key] for kind in (facts, *facts.get("anyOf", ())) for key in sorted(kind) if key in _BOUNDS
            },
        }
        for name, facts in properties.items()
    ]


_BOUNDS = {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "minItems", "maxItems", "pattern", "enum",
}  # fmt: skip


def _type_name(facts: dict[str, Any]) -> str:
    if "anyOf" in facts:
        return " or ".join(map(_type_name, facts["anyOf"]))
    if "enum" in facts:
        return " or ".join(map(repr, facts["enum"]))
    if facts.get("type") == "array" and isinstance(facts.get("items"), dict):
        return f"array of {_type_name(facts['items'])}"
    return str(facts.get("type", "any"))
