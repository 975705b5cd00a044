"""A hub in a separate process: ``python -P -m blendhub.hub.child FD``; ``FD`` is its end of a socket to its owner.

The hub's process is no child of its owner: vLLM ends an engine by killing its process with all children, and the hub
has its arena to remove. It tells its pid in a line. The owner sends the configuration and the transport of the owner's
endpoint in one line, and gets the hub's addresses or an error in one line. The hub serves until the owner closes its
end, or dies. ``multiprocessing`` would run the owner's script again, and refuses to start a process from its daemons.
"""

import asyncio
import os
import signal
import socket
import sys

import msgspec

from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig
from blendhub.hub.hub import Hub
from blendhub.hub.process_tuning import tune_process


class StartReply(msgspec.Struct, frozen=True):
    """The hub's addresses, or why it did not start."""

    endpoint: str = ""
    metrics_address: str = ""
    error: str = ""


async def _serve(owner: socket.socket, config: HubConfig, private: PluginChoice) -> None:
    is_over, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, is_over.set)
    # The owner sends nothing more, so its end is closed when there is something to read.
    loop.add_reader(owner.fileno(), is_over.set)
    async with Hub(config, private=private) as hub:
        owner.sendall(msgspec.json.encode(StartReply(hub.endpoints[0], hub.metrics_address)) + b"\n")
        await is_over.wait()


def main() -> None:
    if os.fork():
        os._exit(0)
    tune_process()
    with socket.socket(fileno=int(sys.argv[1])) as owner:
        owner.sendall(b"%d\n" % os.getpid())
        config, private = msgspec.json.decode(owner.makefile("rb").readline(), type=tuple[HubConfig, PluginChoice])
        try:
            asyncio.run(_serve(owner, config, private))
        except Exception as error:
            owner.sendall(msgspec.json.encode(StartReply(error=str(error))) + b"\n")


if __name__ == "__main__":
    main()
