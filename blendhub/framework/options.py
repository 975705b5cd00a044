"""Options of plugins and settings: msgspec checks them, and an error names the key's path."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from blendhub.core.errors import OptionError

__all__ = ["parse_options"]
"""What plugins import."""

T = TypeVar("T", bound=msgspec.Struct)
WRONG_WORD = re.compile(r"Object contains unknown field `(.*?)`|Invalid enum value '(.*?)'")
PLACE = re.compile(r" - at (`key` in )?`\$([^`]*)`$")
STEP = re.compile(r"\.(\w+)|\[(\d+|\.{3})\]")
"""How msgspec writes the place of a mistake: ``$.hub.listen[0]``; ``[...]`` is a value of a mapping."""
MAX_SHOWN = 200
SECRET = re.compile(r"[^\s/'\"@]+@")
"""The user and the password of a URL."""

Hint: TypeAlias = Callable[[str, Iterable[str]], str]


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` when a valid name is close, else an empty string."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def parse_options(owner: str, options: type[T], values: Mapping[str, Any] | None, hint: Hint = did_you_mean) -> T:
    """Convert options of a configuration; raises OptionError that names ``owner`` and the path of a mistake, and lists
    what is valid there. ``hint`` says of a wrong word, and the valid ones, what may have been meant.
    """
    if values is not None and not isinstance(values, Mapping):
        raise OptionError(f"{owner}: Expected a mapping of names to values, got {values!r}")
    try:
        return msgspec.convert(dict(values or {}), options)
    except msgspec.ValidationError as error:
        raise OptionError(f"{owner}: {_explained(str(error), options, values, hint)}") from None


def _explained(complaint: str, options: type[msgspec.Struct], values: Any, hint: Hint) -> str:
    """What msgspec says, with what it leaves out: the value, and the valid ones at its place."""
    place = PLACE.search(complaint)
    path = [name or number for name, number in STEP.findall(place[2])] if place else []
    schema = msgspec.json.schema(options)
    shapes = list(_shapes(schema, path, schema["$defs"]))
    keys = [key for shape in shapes for key in shape.get("properties", ())]
    words = [word for shape in shapes for word in shape.get("enum", ())]
    if wrong := WRONG_WORD.match(complaint):
        complaint += hint(wrong[1] or wrong[2], keys if wrong[1] else words)
    elif complaint.startswith("Expected") and place and not place[1]:
        complaint += f"; {_shown(_given(values, path))} was given"
    if complaint.startswith("Object"):
        return f"{complaint}; valid keys: {', '.join(keys) or 'none'}"
    return f"{complaint}; valid values: {', '.join(map(repr, words))}" if words else complaint


def _shapes(schema: Mapping[str, Any], path: Sequence[str], known: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas of what may stand at a path."""
    if "$ref" in schema:
        yield from _shapes(known[schema["$ref"].rpartition("/")[2]], path, known)
    elif "anyOf" in schema:
        for shape in schema["anyOf"]:
            yield from _shapes(shape, path, known)
    elif not path:
        yield schema
    else:
        inner = schema.get("properties", {}).get(path[0]) or schema.get("items") or schema.get("additionalProperties")
        if isinstance(inner, Mapping):
            yield from _shapes(inner, path[1:], known)


def _given(values: Any, path: Sequence[str]) -> Any:
    """The value at a path, or the mapping around it where msgspec does not say which one it is."""
    for step in path:
        if step == "...":
            break
        values = values[int(step)] if step.isdecimal() else values[step]
    return values


def _shown(value: Any) -> str:
    text = SECRET.sub("...@", repr(value))
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


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
