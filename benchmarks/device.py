"""An accelerator's device: its rates, relative to those of the bus and of the accelerator's memory, and its arena.

Everything with a bar is a ratio of two things measured in turn, in one run, with the KV that ``benchmarks.bus``
describes. ``--on npu``: the Ascend device. Without the accelerator, every row is missing.
"""

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import bus
from benchmarks.bus import LAYOUT, Bench, half_skipped, in_turn, over_the_bus, ratios
from benchmarks.report import Planned, finish, parser, rows_of
from blendhub.devices import BatchPlanner, HostArena, read_pages

Measured = dict[str, list[float]]
BLOCKS = {"cuda": 16, "npu": 128}
"""The engine's usual block size."""
KERNEL = {
    "scatter_vs_copy": Planned("the kernel from staging to pages, rotating, to a copy on the GPU", "x", 0.80, "higher"),
    "scattered_vs_contiguous": Planned("the same with blocks in any order, to blocks in order", "x", 0.70, "higher"),
}
BESIDE = {
    "loads_beside_prefill": Planned("three loads while the GPU multiplies matrices, to the loads alone", "x the time"),
    "prefill_beside_loads": Planned("the multiplication beside the loads, to the same alone", "x the time"),
}
ARENA = {
    "reserve_s_per_gib": Planned("reserving a GiB of /dev/shm for the arena", "s"),
    "register_s_per_gib": Planned("registering a GiB of it, in parts, without pauses", "s"),
    "replay_ms": Planned("the longest of the steps of a loop that replays a CUDA graph", "ms"),
    "pinning_stalls_a_step_ms": Planned("what pinning the arena adds to the longest step of that loop", "ms", 5.0),
}
MOST_GIB = 4
GIB = 2**30


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--on", choices=list(BLOCKS), default="cuda")
    options = arguments.parse_args()
    chunks, repeats = (4, 3) if options.quick else (16, 9)
    is_there = hasattr(torch, options.on) and torch.get_device_module(options.on).is_available()
    parts: list[Callable[[], Measured]] = [
        lambda: over_the_bus(make, chunks, repeats),
        lambda: half_skipped(make, repeats),
    ]
    make, prefix = partial(make_bench, options.on), "" if options.on == "cuda" else f"{options.on}_"
    planned = dict(bus.BARS)
    if options.on == "cuda":
        parts += [lambda: on_the_gpu(chunks, repeats), lambda: beside_prefill(repeats), arena]
        planned |= KERNEL | BESIDE | ARENA
    measured: Measured = {}
    for part in parts if is_there else ():
        measured |= part()
        torch.get_device_module(options.on).empty_cache()
    rows = rows_of({prefix + id: row for id, row in planned.items()}, {prefix + id: of for id, of in measured.items()})
    packages = ["python", "torch", "triton", "torch_npu", "blendhub", "blendhub-cuda", "blendhub-ascend"]
    finish("device", rows, packages, options.json)


def make_bench(on: str, chunks: int) -> Bench:
    if on == "npu":
        from blendhub_ascend import AscendOptions
        from blendhub_ascend.device import create

        return Bench(create(AscendOptions()), chunks, "split", BLOCKS[on])
    from blendhub_cuda import CudaOptions
    from blendhub_cuda.device import CudaDevice

    return Bench(CudaDevice(CudaOptions()), chunks, "packed_heads", BLOCKS[on])


def on_the_gpu(chunks: int, repeats: int) -> Measured:
    """The device's kernel alone, from chunks in GPU memory to pages, on the engine's stream."""
    from blendhub_cuda.launcher import Launcher

    block = BLOCKS["cuda"]
    bench = make_bench("cuda", min(chunks, 8))  # more than the GPU's cache holds
    staging, other = (torch.zeros(bench.arena.numel(), dtype=torch.uint8, device="cuda") for _ in range(2))
    launcher = Launcher(read_pages(bench.layers, block, LAYOUT), LAYOUT, block)

    def to_blocks(blocks: Any) -> Callable[[], object]:
        """A launch for each chunk, which writes all of it to these blocks."""
        planner = BatchPlanner(LAYOUT, block, LAYOUT.shard_bytes + 2**20)
        launches = [
            partial(
                launcher.rows_to_pages,
                staging[number * LAYOUT.shard_bytes :],
                torch.from_numpy(batch.table.view(np.uint8).reshape(-1)).cuda(),
                batch,
            )
            for number, batch in enumerate(planner.batches(bench.segments, blocks))
        ]
        return lambda: [launch() for launch in launches]

    jobs = {
        "copy": lambda: other.copy_(staging),
        "contiguous": to_blocks(np.arange(len(bench.blocks))),
        "scattered": to_blocks(np.random.default_rng(1).permutation(len(bench.blocks))),
    }
    timed = in_turn(gpu_seconds, repeats, jobs)
    bench.close()
    return {
        "scatter_vs_copy": ratios(timed["copy"], timed["contiguous"]),
        "scattered_vs_contiguous": ratios(timed["contiguous"], timed["scattered"]),
    }


def gpu_seconds(job: Callable[[], object]) -> float:
    """The seconds of the GPU alone, between two events. A sleep before them lets the host submit all work early."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)
    start.record()
    job()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def beside_prefill(repeats: int) -> Measured:
    """Three loads begin together, as of three requests; products of matrices keep the GPU busy as a prefill does."""
    bench = make_bench("cuda", 12)
    shares = [bench.segments[start::3] for start in range(3)]
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(matrix)

    def timed(loads: bool, products: bool) -> tuple[float, float]:
        """Seconds of the loads, and of the products."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        started = time.perf_counter()
        # First, because a load waits for what was submitted before it.
        transfers = [bench.device.load(share, bench.blocks) for share in shares if loads]
        begin.record()
        for _ in range(64 if products else 0):
            torch.mm(matrix, matrix, out=product)
        end.record()
        for transfer in transfers:
            transfer.wait()
        seconds = time.perf_counter() - started
        torch.cuda.synchronize()
        return seconds, begin.elapsed_time(end) / 1000

    measured: Measured = {"loads_beside_prefill": [], "prefill_beside_loads": []}
    for repeat in range(repeats + 1):
        (alone, _), (_, prefill), both = timed(True, False), timed(False, True), timed(True, True)
        if repeat:  # the first round warms up
            measured["loads_beside_prefill"].append(both[0] / alone)
            measured["prefill_beside_loads"].append(both[1] / prefill)
    bench.close()
    return measured


def arena() -> Measured:
    """How long an arena takes to reserve and to register, and what an engine's steps notice while it is pinned."""
    from blendhub_cuda.runtime import CudaRuntime

    gib = min(MOST_GIB, shutil.disk_usage("/dev/shm").free // 2 // GIB)
    if not gib:
        return {}
    runtime = CudaRuntime(torch.device("cuda", 0))
    runtime.enter()
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        started = time.perf_counter()
        os.posix_fallocate(file.fileno(), 0, gib * GIB)
        reserved = time.perf_counter()
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        host_arena = HostArena(memory, runtime)
        parts = [memory[part] for part in host_arena.parts(0, memory.size)]
        begun = time.perf_counter()
        errors = list(filter(None, map(runtime.register, parts)))
        registered = time.perf_counter()
        if errors:
            raise RuntimeError(errors[0])
        for part in parts:
            runtime.unregister(part)
        alone, beside = longest_replay(lambda: None), longest_replay(host_arena.pin)  # with pauses, as a device pins it
        host_arena.unpin()
    return {
        "reserve_s_per_gib": [(reserved - started) / gib],
        "register_s_per_gib": [(registered - begun) / gib],
        "replay_ms": [1000 * alone],
        "pinning_stalls_a_step_ms": [1000 * max(0.0, beside - alone)],
    }


def longest_replay(work: Callable[[], None], steps: int = 1000) -> float:
    """The seconds of the longest step, of ``steps`` or of as many as this work takes in another thread."""
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            torch.mm(matrix, matrix)
    longest = 0.0
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        while steps > 0 or not working.done():
            steps -= 1
            started = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            longest = max(longest, time.perf_counter() - started)
    return longest


if __name__ == "__main__":
    main()
