"""A Mooncake cluster on one machine, of real processes that may be killed, stopped and started again."""

import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from typing import IO

from harness.waiting import free_port, wait_until

HOST = "127.0.0.1"
CLIENT_TTL_S = 3
"""After which the master forgets a node that it does not hear of."""
LEASE_MS = 2000
START_TIMEOUT_S = 30.0
SEGMENT_BYTES = 2**27
PAGE, FLIPPED = 4096, 100
_NODE = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup(sys.argv[1], "P2PHANDSHAKE", int(sys.argv[3]), 0, "tcp", "", sys.argv[2])
print("mounted", code, flush=True)
time.sleep(1e6)
"""


class Cluster:
    """Ends all of its processes when it is closed. What they say is in ``log``."""

    def __init__(self) -> None:
        self._port = free_port()
        self.address = f"{HOST}:{self._port}"
        self.master: subprocess.Popen[bytes] | None = None
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed at the end of the block

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # also of one that is stopped
            process.communicate()
        self._log.close()

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def start_master(self) -> None:
        """The only one at a time; one that is started again has the address of the one before, and knows nothing."""
        program = shutil.which("mooncake_master", path=sysconfig.get_path("scripts")) or "mooncake_master"
        self.master = self._start(
            program,
            f"--rpc_address={HOST}",
            f"--rpc_port={self._port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={free_port()}",
            f"--default_kv_lease_ttl={LEASE_MS}",
            f"--client_ttl={CLIENT_TTL_S}",
        )
        wait_until(lambda: socket.create_connection((HOST, self._port), 1).close(), START_TIMEOUT_S)

    def start_node(self, size: int = SEGMENT_BYTES) -> None:
        """A process that gives memory to the cluster."""
        node = self._start(sys.executable, "-c", _NODE, HOST, self.address, str(size))
        assert node.stdout is not None
        line = node.stdout.readline()
        if line != b"mounted 0\n":
            raise RuntimeError(f"the node said {line!r}\n{self.log}")
        self.nodes.append(node)

    def flip_a_byte_of_every_page(self) -> None:
        """Change the memory that the nodes give, where anything is stored in it."""
        for node in self.nodes:
            with open(f"/proc/{node.pid}/maps") as maps, open(f"/proc/{node.pid}/mem", "r+b", buffering=0) as memory:
                for line in maps:
                    extent, access, *_, inode = line.split()[:5]
                    start, end = (int(at, 16) for at in extent.split("-"))
                    if access.startswith("rw") and inode == "0" and end - start >= SEGMENT_BYTES:
                        _flip(memory, start, end)

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True)
        self._processes.append(process)
        return process


def _flip(memory: IO[bytes], start: int, end: int) -> None:
    for page in range(start, end, PAGE):
        memory.seek(page)
        content = memory.read(PAGE)
        if content.count(0) < PAGE:
            memory.seek(page + FLIPPED)
            memory.write(bytes([content[FLIPPED] ^ 4]))
