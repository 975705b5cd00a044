"""Values of a peer that are out of all bounds: each is refused with a sentence, and none costs the hub a traceback."""

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from blendhub.client import wire
from blendhub.client.hub_client import HubClient
from blendhub.contracts import Envelope
from blendhub.core.errors import InvalidInput, ProtocolError
from blendhub.core.layout import Variant
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import embedded_hub
from blendhub.system.processes import ProcessId
from tests.hub.hub_direct import CHUNK, namespace, tokens

HUGE = 2**63
TEXT = tokens(1, CHUNK).tobytes()


@pytest.fixture(scope="module")
def client():
    with embedded_hub(HubConfig(arena_gib=0.01, metrics="")) as hub, HubClient(hub.endpoint) as client:
        client.register("e", namespace(), rank=0)
        yield client


def numbers_of(kind: Any, at: str, seen: set[type]) -> Iterator[tuple[str, int | None, int | None]]:
    """The places of integers in a type, and their least and greatest values."""
    if isinstance(kind, msgspec.inspect.IntType):
        yield at, kind.ge, kind.le
    elif not isinstance(kind, msgspec.inspect.StructType):
        for name in ("types", "item_types", "item_type"):
            parts = getattr(kind, name, ())
            for part in parts if isinstance(parts, tuple) else [parts]:
                yield from numbers_of(part, at, seen)
    elif kind.cls not in seen:
        seen.add(kind.cls)
        for field in kind.fields:
            yield from numbers_of(field.type, f"{kind.cls.__name__}.{field.name}", seen)


def test_every_number_of_a_request_has_a_least_and_a_greatest_value():
    found = list(numbers_of(msgspec.inspect.type_info(wire.Request), "", set()))
    assert {"Span.end", "Release.lease", "Register.rank", "ProcessId.pid"} <= {at for at, *_ in found}
    assert [one for one in found if None in one] == []


@pytest.mark.parametrize(
    "message, payload",
    [
        ({"is": "Reserve", "span": [0, HUGE]}, [TEXT]),
        ({"is": "Reserve", "span": [HUGE, HUGE]}, [TEXT]),
        ({"is": "Release", "lease": HUGE}, []),
        ({"is": "Lookup", "variant": ["", "s" * 1025]}, [TEXT]),
        ({"is": "Register", "engine": "f", "rank": 0, "namespace": namespace(), "client": 1,
          "process": msgspec.structs.replace(ProcessId.mine(), pid=HUGE)}, []),
    ],
)  # fmt: skip
def test_what_is_out_of_bounds_is_refused_and_named(client, caplog, message, payload):
    asked = Envelope(client._ids() | message, payload)
    with caplog.at_level(logging.WARNING), pytest.raises(ProtocolError, match=r"Expected `\w+` (<=|of length).*`\$"):
        client._connection.submit(asked, 5.0).result()
    assert not caplog.records
    client.stats()


@pytest.mark.parametrize(
    "salt, why", [("s" * 1025, "has 1,025 characters, and at most 1,024"), ("a\ud800", r"has '\\ud800' at 1")]
)
def test_a_salt_that_no_message_can_hold_is_refused_by_the_client(salt, why):
    with pytest.raises(InvalidInput, match=f"cache_salt {why}"):
        Variant(cache_salt=salt)


def test_a_name_that_no_message_can_hold_is_refused_by_the_client(client):
    with pytest.raises(InvalidInput, match=r"a message has a text that is not valid.*ud800"):
        client.explain("\ud800")
