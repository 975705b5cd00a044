"""A hub in a child process: ``python -P -m blendhub.hub.child FD``, where ``FD`` is its end of a socket to its owner.

The owner sends the configuration and the transport of the owner's endpoint in one line, and gets the hub's addresses or
an error in one line. The hub serves until the owner closes its end, or dies. ``multiprocessing`` would run the owner's
script again, and refuses to start a process from its own daemons.
"""

import asyncio
import signal
import socket
import subprocess
import sys

import msgspec

from blendhub.core.errors import HubError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig
from blendhub.hub.hub import Hub
from blendhub.hub.process_tuning import tune_process
from blendhub.system.processes import importing_the_same, python_module


class StartReply(msgspec.Struct, frozen=True):
    """The hub's addresses, or why it did not start."""

    endpoint: str = ""
    metrics_address: str = ""
    error: str = ""


class ChildHub:
    """The owner's end."""

    def __init__(self, config: HubConfig, private: PluginChoice, timeout_s: float) -> None:
        self._line, child_end = socket.socketpair()
        with child_end:
            self._process = subprocess.Popen(
                python_module(__name__, str(child_end.fileno())),
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                # A Ctrl-C in a terminal is meant for the owner, which still needs its hub while it ends.
                start_new_session=True,
                env=importing_the_same(),
            )
        try:
            answer = self._ask(config, private, timeout_s)
        except BaseException:
            self.close(timeout_s)
            raise
        self.endpoint, self.metrics_address = answer.endpoint, answer.metrics_address

    def close(self, timeout_s: float) -> None:
        """End the child process in order, so that it removes its arena and sockets."""
        self._line.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, config: HubConfig, private: PluginChoice, timeout_s: float) -> StartReply:
        # ``config`` may have its owner's keys beside the hub's.
        fields = {name: getattr(config, name) for name in HubConfig.__struct_fields__}
        self._line.settimeout(timeout_s)
        try:
            self._line.sendall(msgspec.json.encode((fields, private)) + b"\n")
            reply = self._line.makefile("rb").readline()
        except TimeoutError:
            raise HubError(f"the hub did not start: its process did not answer in {timeout_s:g} s") from None
        except OSError:
            reply = b""
        if not reply:
            raise HubError(f"the hub did not start: its process ended with exit code {self._process.wait(timeout_s)}")
        answer = msgspec.json.decode(reply, type=StartReply)
        if answer.error:
            raise HubError(f"the hub did not start: {answer.error}")
        return answer


async def _serve(line: socket.socket, config: HubConfig, private: PluginChoice) -> None:
    is_over, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, is_over.set)
    # The owner sends nothing more, so its end is closed when there is something to read.
    loop.add_reader(line.fileno(), is_over.set)
    async with Hub(config, private=private) as hub:
        line.sendall(msgspec.json.encode(StartReply(hub.endpoints[0], hub.metrics_address)) + b"\n")
        await is_over.wait()


def main() -> None:
    tune_process()
    with socket.socket(fileno=int(sys.argv[1])) as line:
        given = msgspec.json.decode(line.makefile("rb").readline(), type=tuple[HubConfig, PluginChoice])
        try:
            asyncio.run(_serve(line, *given))
        except Exception as error:
            line.sendall(msgspec.json.encode(StartReply(error=str(error))) + b"\n")


if __name__ == "__main__":
    main()
