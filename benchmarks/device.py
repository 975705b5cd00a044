"""An accelerator's device: its rates, relative to those of the bus and of the accelerator's memory, and its arena.

Everything with a bar is a ratio of two things measured in turn, in one run. The KV is that of a model of 32 layers,
each with 8 heads of 128 numbers in bfloat16, in chunks of 256 tokens, 32 MiB each. ``--on npu``: the Ascend device.
Without the accelerator, every row is missing.
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

from benchmarks.report import Better, finish, parser, row
from benchmarks.timing import in_turn, ratios
from blendhub import Span
from blendhub.contracts import PagedLayer, PageFormat, Rotation, Segment
from blendhub.core.layout import KVLayout
from blendhub.devices import BatchPlanner, HostArena, StreamDevice, read_pages

Measured = dict[str, list[float]]
LAYERS, HEADS, WIDTH, CHUNK, POSITIONS = 32, 8, 128, 256, 32_768
LAYOUT = KVLayout(layers=LAYERS, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="bfloat16", chunk_tokens=CHUNK)
MOVED = 1000
"""The distance between the keys' old and new positions."""
BLOCKS = {"cuda": 16, "npu": 128}
"""The engine's usual block size."""
MAX_GIB, GIB = 4, 2**30
ROWS: dict[str, tuple[str, str, float | None, Better]] = {
    "load_vs_dma": ("a load with rotation, to the rate of one pinned copy", "x", 0.90, "higher"),
    "save_vs_dma": ("a save, to the rate of one pinned copy", "x", 0.90, "higher"),
    "half_skipped": ("a load of four chunks with half of them skipped, to all of them", "of its time", 0.60, "lower"),
    "both_ways": ("loads and saves at once, to loads alone", "x its rate", 1.5, "higher"),
    "load_gb_s": ("a load with rotation", "GB/s", None, "higher"),
    "save_gb_s": ("a save", "GB/s", None, "higher"),
}
GPU_ROWS: dict[str, tuple[str, str, float | None, Better]] = {
    "scatter_vs_copy": ("the kernel from staging to pages, rotating, to a copy on the GPU", "x", 0.80, "higher"),
    "scattered_vs_contiguous": ("the same with blocks in any order, to blocks in order", "x", 0.70, "higher"),
    "reserve_s_per_gib": ("reserving a GiB of /dev/shm for the arena", "s", None, "lower"),
    "register_s_per_gib": ("registering a GiB of it, in parts, without pauses", "s", None, "lower"),
    "replay_ms": ("the longest of the steps of a loop that replays a CUDA graph", "ms", None, "lower"),
    "pinning_stalls_a_step_ms": ("what pinning the arena adds to the longest step of that loop", "ms", 5.0, "lower"),
}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--on", choices=list(BLOCKS), default="cuda")
    options = arguments.parse_args()
    chunks, repeats = (4, 3) if options.quick else (16, 9)
    parts: list[Callable[[], Measured]] = [lambda: over_the_bus(options.on, chunks, repeats)]
    parts += [lambda: half_skipped(options.on, repeats)]
    prefix, planned = f"{options.on}_", ROWS
    if options.on == "cuda":
        parts += [lambda: on_the_gpu(chunks, repeats), arena]
        prefix, planned = "", ROWS | GPU_ROWS
    measured: Measured = {}
    if hasattr(torch, options.on) and torch.get_device_module(options.on).is_available():
        for part in parts:
            with torch.inference_mode():  # as an engine's worker runs
                measured |= part()
            torch.get_device_module(options.on).empty_cache()
    rows = [
        row(
            prefix + id,
            what if id in measured else f"not measured here: {what}",
            unit,
            measured.get(id, []),
            bar,
            better,
        )
        for id, (what, unit, bar, better) in planned.items()
    ]
    finish("device", rows, "torch triton torch_npu blendhub-cuda blendhub-ascend", options.json)


class Bench:
    """A device between pages in an accelerator's memory and an arena, with the segments of ``chunks`` moved chunks."""

    def __init__(self, on: str, chunks: int) -> None:
        self.device, format, shapes = _device(on, chunks * CHUNK // BLOCKS[on])
        angles = torch.outer(torch.arange(POSITIONS), 10_000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)))
        rotation = Rotation(torch.cat([angles.cos(), angles.sin()], 1).float().to(on), True)
        pages = [tuple(torch.zeros(shape, dtype=torch.bfloat16, device=on) for shape in shapes) for _ in range(LAYERS)]
        self.layers = [PagedLayer(f"layer {n}", format, planes, rotation) for n, planes in enumerate(pages)]
        self.device.attach(self.layers, BLOCKS[on], LAYOUT)
        self.arena = torch.zeros(chunks * LAYOUT.shard_bytes, dtype=torch.uint8)
        self.device.pin(self.arena.numpy())
        self.device.wait_until_pinned()
        self.blocks = np.arange(chunks * CHUNK // BLOCKS[on])
        self.segments = [
            Segment(Span(at, at + CHUNK), number * LAYOUT.shard_bytes, 0, at + MOVED)
            for number, at in enumerate(range(0, chunks * CHUNK, CHUNK))
        ]

    def load(self, segments: list[Segment], skip: int = 0) -> Any:
        return self.device.load(segments, self.blocks, skip)

    def save(self, segments: list[Segment]) -> Any:
        return self.device.save(segments, self.blocks)


def _device(on: str, n_blocks: int) -> tuple[StreamDevice, PageFormat, list[tuple[int, ...]]]:
    """It, and the format and the shapes of a layer's pages."""
    if on == "npu":
        from blendhub_ascend import AscendOptions
        from blendhub_ascend.device import create

        return create(AscendOptions()), "split", [(n_blocks, BLOCKS[on], HEADS, WIDTH)] * 2
    from blendhub_cuda import CudaOptions
    from blendhub_cuda.device import CudaDevice

    return CudaDevice(CudaOptions()), "packed_heads", [(n_blocks, HEADS, BLOCKS[on], 2 * WIDTH)]


def over_the_bus(on: str, chunks: int, repeats: int) -> Measured:
    bench = Bench(on, chunks)
    first, second = bench.segments[: chunks // 2], bench.segments[chunks // 2 :]
    there = torch.empty_like(bench.arena, device=on)
    here = torch.empty(bench.arena.numel(), dtype=torch.uint8, pin_memory=True)
    jobs = {
        "to_device": lambda: there.copy_(here, non_blocking=True),
        "to_host": lambda: here.copy_(there, non_blocking=True),
        "load": lambda: bench.load(bench.segments).wait(),
        "save": lambda: bench.save(bench.segments).wait(),
        "load_half": lambda: bench.load(first).wait(),
        "both": lambda: [transfer.wait() for transfer in (bench.load(first), bench.save(second))],
    }
    timed = in_turn(jobs, repeats, partial(seconds_on, on))
    bench.device.close()
    return {
        "load_vs_dma": ratios(timed["to_device"], timed["load"]),
        "save_vs_dma": ratios(timed["to_host"], timed["save"]),
        "both_ways": [2 * ratio for ratio in ratios(timed["load_half"], timed["both"])],
        "load_gb_s": [bench.arena.nbytes / seconds / 1e9 for seconds in timed["load"]],
        "save_gb_s": [bench.arena.nbytes / seconds / 1e9 for seconds in timed["save"]],
    }


def half_skipped(on: str, repeats: int) -> Measured:
    bench = Bench(on, 4)
    jobs = {
        "all": lambda: bench.load(bench.segments).wait(),
        "half": lambda: bench.load(bench.segments, 2 * CHUNK).wait(),
    }
    timed = in_turn(jobs, 10 * repeats, partial(seconds_on, on))
    bench.device.close()
    return {"half_skipped": ratios(timed["half"], timed["all"])}


def seconds_on(place: str, job: Callable[[], object]) -> float:
    accelerator = torch.get_device_module(place)
    accelerator.synchronize()
    start = time.perf_counter()
    job()
    accelerator.synchronize()
    return time.perf_counter() - start


def on_the_gpu(chunks: int, repeats: int) -> Measured:
    """The device's kernel alone, from chunks in GPU memory to pages, on the engine's stream."""
    from blendhub_cuda.launcher import Launcher

    block = BLOCKS["cuda"]
    bench = Bench("cuda", min(chunks, 8))  # more than the GPU's cache holds
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
    timed = in_turn(jobs, repeats, gpu_seconds)
    bench.device.close()
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


def arena() -> Measured:
    """How long an arena takes to reserve and to register, and what an engine's steps notice while it is pinned."""
    from blendhub_cuda.runtime import CudaRuntime

    gib = min(MAX_GIB, shutil.disk_usage("/dev/shm").free // 2 // GIB)
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
