"""What a person writes as options: every mistake is named, with what would be right."""

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from blendhub.core.errors import OptionError
from blendhub.framework.options import describe_options, parse_options


class Within(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    depth: int = 0


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    low: Annotated[int, Meta(ge=1, description="the lower bound")] = 1
    high: Annotated[int, Meta(le=100, description="the upper bound")] = 10
    order: Annotated[Literal["old", "new"], Meta(description="what goes first")] = "old"
    ids: Annotated[tuple[int, ...], Meta(min_length=1, description="some ids")] = (0,)
    rate: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="how fast")] = None
    within: Annotated[Within, Meta(description="more of them")] = Within()
    bands: Annotated[dict[str, Within], Meta(description="some by name")] = {}

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} must not be above high = {self.high}")


def parse(values):
    return parse_options("gadget 'mine'", Options, values)


def test_what_is_written_is_taken_and_the_rest_is_default():
    assert parse(None) == parse({}) == Options()
    written = {"low": 2, "ids": [7, 8], "order": "new", "rate": 1}
    assert parse(written) == Options(low=2, ids=(7, 8), order="new", rate=1.0)


@pytest.mark.parametrize(
    "values, complaint",
    [
        (
            {"hihg": 3},
            r"gadget 'mine': Object contains unknown field `hihg` \(did you mean 'high'\?\); valid keys: low, ",
        ),
        ({"foo": 3}, r"unknown field `foo`; valid keys: low, high, order, ids, rate, within, bands$"),
        ({"within": {"dpeth": 3}}, r"`dpeth` - at `\$.within` \(did you mean 'depth'\?\); valid keys: depth$"),
        ({"order": "odd"}, r"value 'odd' - at `\$.order` \(did you mean 'old'\?\); valid values: 'new', 'old'$"),
        ({"order": "up"}, r"value 'up' - at `\$.order`; valid values: 'new', 'old'$"),
        ({"order": 3}, r"got `int` - at `\$.order`; 3 was given; valid values: 'new', 'old'$"),
        # What is near, but elsewhere, is not meant.
        ({"order": "depth"}, r"value 'depth' - at `\$.order`; valid"),
        ({"old": 1}, r"unknown field `old`; valid keys"),
        ({"low": "3"}, r"gadget 'mine': Expected `int`, got `str` - at `\$.low`; '3' was given$"),
        ({"low": 0}, r"Expected `int` >= 1 - at `\$.low`; 0 was given$"),
        ({"ids": [7, "x"]}, r"Expected `int`, got `str` - at `\$.ids\[1\]`; 'x' was given$"),
        ({"ids": list(range(99)) * 9 + [[]]}, r"; \[\] was given$"),
        ({"rate": "x" * 999}, r"`\$.rate`; 'x{199}\.\.\. was given$"),
        (
            {"bands": {"a": {"depht": 1}}},
            r"`depht` - at `\$.bands\[...\]` \(did you mean 'depth'\?\); valid keys: depth$",
        ),
        ({"bands": {"a": {"depth": "x"}}}, r"- at `\$.bands\[...\].depth`; {'a': {'depth': 'x'}} was given$"),
        ({"bands": {1: {}}}, r"Expected `str`, got `int` - at `key` in `\$.bands`$"),
        ({"low": 20}, "low = 20 must not be above high = 10"),
        ("low", "gadget 'mine': Expected a mapping of names to values"),
    ],
)
def test_a_mistake_is_named_with_its_path_and_what_was_meant(values, complaint):
    with pytest.raises(OptionError, match=complaint):
        parse(values)


def test_options_are_described_as_plain_data():
    rows = {row["name"]: row for row in describe_options(Options)}
    assert list(rows) == ["low", "high", "order", "ids", "rate", "within", "bands"]
    assert rows["low"] == {
        "name": "low",
        "type": "integer",
        "default": 1,
        "description": "the lower bound",
        "bounds": {"minimum": 1},
    }
    assert rows["order"]["type"] == "'new' or 'old'"
    assert rows["ids"]["type"] == "array of integer" and rows["ids"]["bounds"] == {"minItems": 1}
    assert rows["rate"]["type"] == "number or null" and rows["rate"]["default"] is None
    assert rows["rate"]["bounds"] == {"exclusiveMinimum": 0}
