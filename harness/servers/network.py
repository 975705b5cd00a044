"""Machines of a fleet on this one: network namespaces that a switch joins, or loopback addresses."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

_NEW_NETWORK = 0x40000000
_SUBNET = "10.77.0"
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()"
_NEEDED = ("ip", "nsenter")
_CONNECT_S = 10.0


class NotPermitted(Exception):
    """This process may not make network namespaces, or lacks a program for it."""


@dataclass(frozen=True)
class Machine:
    """Where processes of a fleet run: an address, in a network namespace if there is one."""

    address: str = "127.0.0.1"
    namespace: str = ""
    """A path; empty for that of this process."""

    def command(self, *command: str) -> list[str]:
        """What to start, so that the process runs on this machine."""
        return ["nsenter", f"--net={self.namespace}", *command] if self.namespace else list(command)

    def arrange(self) -> list[str]:
        """What an engine of the harness calls before it starts, so that it runs on this machine."""
        return ["harness.servers.network:enter", self.namespace] if self.namespace else []

    def connect(self, port: int) -> None:
        """Raise unless something listens at the port of this machine."""
        command = self.command(sys.executable, "-S", "-c", _CONNECT, self.address, str(port))
        subprocess.run(command, check=True, capture_output=True, timeout=_CONNECT_S)


THIS = Machine()


class Network:
    """Machines in network namespaces, each with a cable to one switch; all are gone when it is closed."""

    def __init__(self) -> None:
        if missing := [name for name in _NEEDED if shutil.which(name) is None]:
            raise NotPermitted(f"network namespaces need {' and '.join(missing)}")
        self._open = contextlib.ExitStack()
        self._machines: list[Machine] = []
        try:
            self._switch = Machine(namespace=self._namespace())
            _ip(self._switch, "link add switch type bridge")
            _ip(self._switch, "link set switch up")
        except (OSError, subprocess.CalledProcessError) as error:
            self._open.close()
            raise NotPermitted(f"network namespaces cannot be made here: {error}") from None

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self) -> Machine:
        """One more machine, on the switch."""
        number = len(self._machines) + 1
        machine = Machine(f"{_SUBNET}.{number}", self._namespace())
        _ip(self._switch, f"link add port{number} type veth peer name cable netns {machine.namespace}")
        _ip(self._switch, f"link set port{number} master switch up")
        _ip(machine, "link set lo up")
        _ip(machine, f"address add {machine.address}/24 dev cable")
        _ip(machine, "link set cable up")
        self._machines.append(machine)
        return machine

    def unplug(self, machine: Machine) -> None:
        """Pull the machine's cable: packets are lost, and its connections stay open."""
        self._set_port(machine, "down")

    def plug(self, machine: Machine) -> None:
        self._set_port(machine, "up")

    def _set_port(self, machine: Machine, state: str) -> None:
        _ip(self._switch, f"link set port{self._machines.index(machine) + 1} {state}")

    def _namespace(self) -> str:
        """The path of a new one, which lasts until this is closed and its last process has ended."""
        made: list[int] = []
        # A thread enters it and ends: this process stays where it is.
        maker = threading.Thread(target=_make_namespace, args=[made])
        maker.start()
        maker.join()
        if not made:
            raise NotPermitted("this process may not make network namespaces")
        self._open.callback(os.close, made[0])
        return f"/proc/{os.getpid()}/fd/{made[0]}"


def _ip(machine: Machine, command: str) -> None:
    subprocess.run(machine.command("ip", *command.split()), check=True, capture_output=True)


def enter(namespace: str) -> None:
    """Move the calling thread, and what it starts from now on, into a network namespace."""
    handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(handle)


@contextlib.contextmanager
def machines(n: int) -> Iterator[list[Machine]]:
    """Machines in network namespaces where that is permitted, and otherwise at loopback addresses."""
    with contextlib.ExitStack() as closing:
        try:
            network = closing.enter_context(Network())
        except NotPermitted:
            yield [Machine(f"127.0.0.{number + 1}") for number in range(n)]
            return
        yield [network.add() for _ in range(n)]


def _make_namespace(made: list[int]) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) == 0:
        made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
