"""The process that calls Mooncake: ``python -P -m blendhub_mooncake.child OWNER CONTROL LANE...``.

``OWNER`` is the pid of the process that started it, the others are descriptors of its ends of socket pairs. On each
lane it answers one call after another, from and into the arena's memory itself. It ends when its owner closes the
control line, and dies with its owner.
"""

import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
from typing import Any

from blendhub_mooncake.frames import Call, ChildSetup, Codes, Started, receive, send

PR_SET_PDEATHSIG = 1
INTERNAL_ERROR = -1


def address_towards(master: str) -> str:
    """The address of this machine that packets to the master have."""
    host, _, port = master.rpartition(":")
    family, kind, _, _, peer = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as line:
        line.connect(peer)  # sends nothing
        return str(line.getsockname()[0])


class Mooncake:
    """A client of Mooncake that provides no memory, and the arena that it copies from and into."""

    def __init__(self, setup: ChildSetup) -> None:
        from mooncake.store import MooncakeDistributedStore

        arena = setup.arena
        with open(arena.path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), arena.slots_at + arena.size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + arena.slots_at
        self.store: Any = MooncakeDistributedStore()
        code = self.store.setup(
            local_hostname=setup.address or address_towards(setup.master),
            metadata_server=setup.metadata,
            global_segment_size=0,
            local_buffer_size=0,
            protocol=setup.protocol,
            rdma_devices=setup.devices,
            master_server_addr=setup.master,
        )
        if code:
            raise OSError(f"Mooncake's setup failed with code {code}; is mooncake_master reachable at {setup.master}?")
        code = self.store.register_buffer(self._base, arena.size)
        if code:
            raise OSError(f"Mooncake's register_buffer refused {arena.size} bytes of shared memory: code {code}")

    def answer(self, call: Call) -> list[int]:
        if call.what == "remove":
            return list(self.store.batch_remove(call.keys))
        addresses = [self._base + offset for offset, _ in call.extents]
        lengths = [length for _, length in call.extents]
        work = self.store.batch_get_into if call.what == "get" else self.store.batch_put_from
        return list(work(call.keys, addresses, lengths))


def _serve(mooncake: Mooncake, lane: socket.socket) -> None:
    while True:
        try:
            call = receive(lane, Call)
        except OSError:  # the owner has closed it
            return
        try:
            codes = mooncake.answer(call)
        except Exception as error:
            print(f"Mooncake could not {call.what}: {error!r}", file=sys.stderr)
            codes = [INTERNAL_ERROR] * len(call.keys)
        send(lane, Codes(codes))


def _die_with(owner: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:  # it died before this process asked for the signal
        os._exit(1)


def main() -> None:
    _die_with(owner=int(sys.argv[1]))
    control, *lanes = [socket.socket(fileno=int(fd)) for fd in sys.argv[2:]]
    try:
        mooncake = Mooncake(receive(control, ChildSetup))
    except Exception as error:
        send(control, Started(str(error) or repr(error)))
        return
    for lane in lanes:
        threading.Thread(target=_serve, args=[mooncake, lane], daemon=True).start()
    send(control, Started())
    control.settimeout(None)
    control.recv(1)  # the owner sends nothing more
    mooncake.store.close()
    os._exit(0)  # a thread may still be in a call, and Python would wait for it


if __name__ == "__main__":
    main()
