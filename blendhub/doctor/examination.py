"""All checks, one after the other."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from blendhub.doctor.circumstances import Circumstances
from blendhub.doctor.clock import clock
from blendhub.doctor.configuration import configuration
from blendhub.doctor.devices import devices
from blendhub.doctor.endpoint import endpoint
from blendhub.doctor.finding import Finding, fail
from blendhub.doctor.huge_pages import huge_pages
from blendhub.doctor.leftovers import leftovers_of_hubs
from blendhub.doctor.memory import memory_limits, shared_memory
from blendhub.doctor.plugins import plugins
from blendhub.doctor.self_test import self_test
from blendhub.doctor.sockets import sockets
from blendhub.doctor.stores import stores
from blendhub.doctor.versions import versions

Check: TypeAlias = Callable[[Circumstances], Iterator[Finding]]

# Leftovers come before the self-test, whose hub removes them.
CHECKS: tuple[Check, ...] = (
    configuration,
    endpoint,
    plugins,
    shared_memory,
    memory_limits,
    huge_pages,
    sockets,
    stores,
    leftovers_of_hubs,
    clock,
    self_test,
    versions,
    devices,
)


def examine(at: Circumstances) -> Iterator[Finding]:
    """What all checks find, as they find it."""
    for check in CHECKS:
        try:
            yield from check(at)
        except Exception as error:  # the other checks are made all the same
            yield fail(
                check.__name__.replace("_", " "),
                f"this check broke off: {type(error).__name__}: {error}",
                "blendhub doctor --json > doctor.json",
            )
