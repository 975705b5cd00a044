"""Hubs of one fleet without transports: tests let them run, and wait for what they are to agree on."""

import asyncio
import secrets
import time

from blendhub_fleet.directory import open_store
from blendhub_fleet.options import DirectoryOptions

from blendhub.client import wire
from tests.hub.hub_direct import CHUNK, tokens

TEXT = tokens(1, 3 * CHUNK)
SOON_S = 60.0
"""Far more than it takes, on a machine that is busy with other tests."""


class Fleet:
    """Hubs of one group, which run when they are asked to."""

    def __init__(self, make_hub, server, path, **options):
        self.make_hub, self.server, self.path = make_hub, server, path
        self.group = f"group-{secrets.token_hex(4)}"
        self.options = {"deadline_s": 10.0, **options}
        self.hubs = []

    def open(self):
        return open_store(
            DirectoryOptions(catalogue=self.server.url, group=self.group, path=str(self.path), **self.options)
        )

    def hub(self, n_slots=32):
        self.hubs.append(self.make_hub(n_slots=n_slots, store=self.open))
        return self.hubs[-1]

    def pair(self):
        """Two hubs that see each other."""
        one, other = self.hub(), self.hub()
        self.until(lambda: one.follower.hubs == other.follower.hubs == 2, "the hubs see each other")
        return one, other

    def until(self, condition, what):
        """Let all hubs run until the condition holds."""
        deadline = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {SOON_S:.0f} s"
            for hub in self.hubs:
                hub.run(pause())

    def until_each_knows(self, n_chunks):
        self.until(lambda: all(known(hub) == n_chunks for hub in self.hubs), f"every hub knows {n_chunks} chunks")
        for hub in self.hubs:
            hub.state.check_integrity()

    def files(self):
        return list(self.path.rglob("*.kv"))


async def pause():
    await asyncio.sleep(0.002)


def known(hub):
    return sum(index.n_chunks for index in hub.state.indexes)


def store(hub, member, text=TEXT, **more):
    """Store a text, and wait until it was offered to the fleet."""
    reserved = member.store(text, **more)
    hub.settle()
    return reserved


def read(member, text=TEXT, **more):
    """How many tokens of the text come; all of them are checked."""
    found = member.read(text, wait_s=10.0, **more)
    member.check(found, text)
    if found.lease is not None:
        member.ask(wire.Release, lease=found.lease)
    return sum(len(piece.span) for piece in found.pieces)


def count(hub, name):
    stats = hub.service.stats()
    return stats.counters[name] if name in stats.counters else stats.gauges[name]
