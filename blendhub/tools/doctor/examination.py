"""All checks, one after the other."""

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from blendhub.core.errors import OptionError
from blendhub.framework.options import did_you_mean
from blendhub.tools.doctor.files import leftovers_of_hubs, sockets, stores
from blendhub.tools.doctor.finding import Circumstances, Finding, fail
from blendhub.tools.doctor.hubs import endpoint, self_test
from blendhub.tools.doctor.machine import huge_pages, memory_limits, shared_memory
from blendhub.tools.doctor.software import configuration, devices, plugins, versions

Check: TypeAlias = Callable[[Circumstances], Iterator[Finding]]

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "configuration": configuration,
        "endpoint": endpoint,
        "plugins": plugins,
        "shared-memory": shared_memory,
        "memory-limits": memory_limits,
        "huge-pages": huge_pages,
        "sockets": sockets,
        "stores": stores,
        # Before the self-test, whose hub removes them.
        "leftovers": leftovers_of_hubs,
        "self-test": self_test,
        "versions": versions,
        "devices": devices,
    }
)


def examine(at: Circumstances, only: Collection[str] = ()) -> Iterator[Finding]:
    """The findings of all checks, or of just those named, as they come."""
    for name in only:
        if name not in CHECKS:
            raise OptionError(f"no check {name!r}{did_you_mean(name, CHECKS)}; there are: {', '.join(CHECKS)}")
    for name in only or CHECKS:
        try:
            for finding in CHECKS[name](at):
                yield msgspec.structs.replace(finding, check=name)
        except Exception as error:  # the other checks are made all the same
            broke_off = fail(f"this check broke off: {type(error).__name__}: {error}", "blendhub doctor --json")
            yield msgspec.structs.replace(broke_off, check=name)
