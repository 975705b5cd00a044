"""``python -m examples.fleet_demo``: what one machine's engine computed is reused by another's.

Each of the two machines is a network namespace with a hub and an engine, or an address of this machine where
namespaces are not permitted. Redis and Mooncake run on a third.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from examples.demo.command import Engines, run, start_engine
from harness.servers.network import machines
from harness.servers.served_hub import two_hubs, wait_until_followed

ARENAS_GIB = 1.0, 0.15
"""The second has room for little more than one prompt, so that it fetches each prompt."""


@contextmanager
def two_machines() -> Iterator[Engines]:
    print("start Redis, Mooncake and two hubs", flush=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        three = stack.enter_context(machines(3))
        hubs = stack.enter_context(two_hubs(Path(folder), ARENAS_GIB, three))
        writer, reader = (
            stack.enter_context(start_engine({"endpoint": hub.endpoint}, machine.arrange()))
            for hub, machine in zip(hubs, three[:2], strict=True)
        )
        yield writer, reader, partial(wait_until_followed, *hubs)


if __name__ == "__main__":
    run("examples.fleet_demo", Path("build/fleet-demo"), two_machines)
