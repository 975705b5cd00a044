"""How long a large arena takes to reserve and to register on a machine with a GPU, and what an engine's steps notice.

Only what the steps wait for has a bar.
"""

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.report import Planned, Row, rows_of
from blendhub.devices import HostArena, Runtime

FIGURES = {
    "reserve_s_per_gib": Planned("reserving a GiB of /dev/shm for the arena", "s"),
    "register_1_s_per_gib": Planned("registering a GiB of it, in parts, by one process", "s"),
    "register_4_s_per_gib": Planned("the same by four processes at once", "s"),
    "replay_ms": Planned("the longest of the steps of a loop that replays a CUDA graph", "ms"),
    "replay_beside_pinning_ms": Planned("the same while the device's own thread pins the arena", "ms"),
    "pinning_stalls_a_step_ms": Planned("what pinning the arena adds to the longest step of that loop", "ms", 5.0),
}
MOST_GIB = 40
PINNED_GIB = 4
"""How much is pinned beside the steps, with pauses as a device makes them."""

GIB = 2**30


def rows() -> list[Row]:
    return rows_of(FIGURES, {id: [value] for id, value in measured().items()} if torch.cuda.is_available() else {})


def measured() -> dict[str, float]:
    gib = min(MOST_GIB, shutil.disk_usage("/dev/shm").free // 2 // GIB)
    if not gib:
        return {}
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        started = time.perf_counter()
        os.posix_fallocate(file.fileno(), 0, gib * GIB)
        found = {"reserve_s_per_gib": (time.perf_counter() - started) / gib}
        for n in (1, 4):
            with ThreadPoolExecutor(n) as pool:
                seconds = list(pool.map(_seconds_elsewhere, [file.name] * n))
            found[f"register_{n}_s_per_gib"] = max(seconds) / gib
        found["replay_ms"] = 1000 * longest_replay(None)
        found["replay_beside_pinning_ms"] = 1000 * longest_replay(file.name)
        found["pinning_stalls_a_step_ms"] = max(0.0, found["replay_beside_pinning_ms"] - found["replay_ms"])
    return found


def _seconds_elsewhere(path: str) -> float:
    script = "import sys; from benchmarks.gpu_arena import register; print(register(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    return float(done.stdout)


def register(path: str) -> float:
    """The seconds to register the whole file for the GPU, without pauses."""
    runtime, arena = _runtime(), _mapped(path)
    parts = np.split(arena, range(runtime.registration_bytes, arena.size, runtime.registration_bytes))
    started = time.perf_counter()
    errors = list(filter(None, map(runtime.register, parts)))
    seconds = time.perf_counter() - started
    if errors:
        raise RuntimeError(errors[0])
    for part in parts:
        runtime.unregister(part)
    return seconds


def pin(path: str) -> None:
    """Pin the beginning of the file as a device pins the arena."""
    arena = HostArena(_mapped(path)[: PINNED_GIB * GIB], _runtime())
    arena.pin()
    arena.unpin()


def _runtime() -> Runtime:
    from blendhub_cuda.runtime import CudaRuntime

    runtime = CudaRuntime(torch.device("cuda", 0))
    runtime.enter()
    torch.zeros(1, device="cuda")
    return runtime


def _mapped(path: str) -> npt.NDArray[np.uint8]:
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


def longest_replay(path: str | None, steps: int = 1000) -> float:
    """The seconds of the longest step, of ``steps`` or of as many as another thread takes to pin this file."""
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            torch.mm(matrix, matrix)
    longest = 0.0
    with ThreadPoolExecutor(1) as pool:
        pinning = pool.submit(pin, path) if path else None
        while steps > 0 or (pinning and not pinning.done()):
            steps -= 1
            started = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            longest = max(longest, time.perf_counter() - started)
    return longest
