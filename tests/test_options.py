"""What a person writes as options: every mistake is named, with what would be right."""

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from blendhub.core.errors import OptionError
from blendhub.framework.options import describe_options, mistakes_in, parse_options


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    low: Annotated[int, Meta(ge=1, description="the lower bound")] = 1
    high: Annotated[int, Meta(le=100, description="the upper bound")] = 10
    order: Annotated[Literal["old", "new"], Meta(description="what goes first")] = "old"
    ids: Annotated[tuple[int, ...], Meta(min_length=1, description="some ids")] = (0,)
    rate: Annotated[float | None, Meta(description="how fast")] = None

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} must not be above high = {self.high}")


def parse(given):
    return parse_options("gadget 'mine'", Options, given)


def test_nothing_given_means_the_defaults():
    assert parse(None) == parse({}) == Options()


def test_what_is_given_is_taken():
    assert parse({"low": 2, "ids": [7, 8], "order": "new", "rate": 1}) == Options(
        low=2, ids=(7, 8), order="new", rate=1.0
    )


@pytest.mark.parametrize(
    "given, complaint",
    [
        ({"hihg": 3}, r"gadget 'mine' has no option 'hihg' \(did you mean 'high'\?\); its options are: high, ids, low"),
        ({3: 3}, "has no option 3"),
        ({"low": "3"}, "option low = '3' is not valid: Expected `int"),
        ({"low": True}, "option low = True is not valid"),
        ({"low": 1.5}, "option low = 1.5 is not valid"),
        ({"low": 0}, "option low = 0 is not valid: Expected `int` >= 1"),
        ({"high": 101}, "option high = 101 is not valid: Expected `int` <= 100"),
        ({"order": "odd"}, "option order = 'odd' is not valid"),
        ({"ids": []}, "option ids = .* is not valid"),
        ({"ids": ["a"]}, "option ids = .* is not valid"),
        ({"low": 20}, "low = 20 must not be above high = 10"),
        ([("low", 3)], "options must be a mapping"),
        ("low", "options must be a mapping"),
    ],
)
def test_a_mistake_is_named(given, complaint):
    with pytest.raises(OptionError, match=complaint):
        parse(given)


def test_every_mistake_is_named_at_once():
    found = mistakes_in("gadget 'mine'", Options, {"low": 0, "hihg": 1, "order": "odd", "ids": []})
    assert len(found) == 4
    with pytest.raises(OptionError) as raised:
        parse({"low": 0, "hihg": 1, "order": "odd", "ids": []})
    assert str(raised.value) == "; also: ".join(found)


def test_words_to_choose_from_are_named():
    (found,) = mistakes_in("gadget 'mine'", Options, {"order": "odd"})
    assert found.endswith("; it can be 'new', 'old' (did you mean 'old'?)")


def test_options_are_described_as_plain_data():
    rows = {row["name"]: row for row in describe_options(Options)}
    assert list(rows) == ["low", "high", "order", "ids", "rate"]
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
