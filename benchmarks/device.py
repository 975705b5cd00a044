"""The CUDA device's rates relative to the limits of the bus and of GPU memory. Without a GPU, every row is missing.

Everything is a ratio of two things measured in turn, in one run: the KV of a model of 32 layers, each with 8 heads of
128 numbers in bfloat16, in chunks of 256 tokens, 32 MiB each.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.report import Row, arguments, finish, missing_row, row
from blendhub import Span
from blendhub.contracts import PagedLayer, PageFormat, Rotation, Segment
from blendhub.layout import KVLayout

LAYERS, HEADS, WIDTH, CHUNK, BLOCK = 32, 8, 128, 256, 16
POSITIONS = 32_768
LAYOUT = KVLayout(layers=LAYERS, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="bfloat16", chunk_tokens=CHUNK)
MOVED = 1000
"""The distance between the keys' old and new positions."""

BARS: dict[str, tuple[str, str, float, Any]] = {
    "load_vs_dma": ("a load with rotation, to the rate of one pinned copy", "x", 0.90, "higher"),
    "save_vs_dma": ("a save, to the rate of one pinned copy", "x", 0.90, "higher"),
    "scatter_vs_copy": ("the kernel from staging to pages, with rotation, to a copy on the GPU", "x", 0.80, "higher"),
    "scattered_vs_contiguous": ("the same with blocks in any order, to blocks in order", "x", 0.70, "higher"),
    "half_skipped": ("a load of a chunk with half of it skipped, to all of it", "of its time", 0.60, "lower"),
    "vs_index_copy": ("a chunk by torch, layer by layer, to the kernel's time", "x", 5.0, "higher"),
    "both_ways": ("loads and saves at once, to loads alone", "x its rate", 1.5, "higher"),
}


def main() -> None:
    options = arguments(__doc__ or "")
    measured = measure(4 if options.quick else 16, 3 if options.quick else 9) if torch.cuda.is_available() else {}
    finish("device", rows_of(measured), ["python", "torch", "triton", "blendhub", "blendhub-cuda"], options.json)


def rows_of(measured: Mapping[str, list[float]]) -> list[Row]:
    rows = []
    for id, (what, unit, bar, better) in BARS.items():
        if id in measured:
            rows.append(row(id, what, unit, measured[id], bar, better))
        else:
            rows.append(missing_row(id, f"not yet measured: {what}", unit, bar, better))
    return rows


def measure(chunks: int, repeats: int) -> dict[str, list[float]]:
    """Each row's values, one for each repetition."""
    found: dict[str, list[float]] = {}
    for part in (over_the_bus, half_skipped, on_the_gpu, beside_torch):
        found |= part(chunks, repeats)
        torch.cuda.empty_cache()
    return found


def over_the_bus(chunks: int, repeats: int) -> dict[str, list[float]]:
    bench = Bench(chunks)
    half = chunks // 2
    device, host = torch.empty_like(bench.arena, device="cuda"), bench.arena
    others = [Segment(one.span, one.shard, 0, one.span.start) for one in bench.segments]
    timed = in_turn(
        repeats,
        {
            "to_gpu": lambda: device.copy_(host, non_blocking=True),
            "to_host": lambda: host.copy_(device, non_blocking=True),
            "load": lambda: bench.device.load(bench.segments, bench.blocks).wait(),
            "save": lambda: bench.device.save(others, bench.blocks).wait(),
            "load_half": lambda: bench.device.load(bench.segments[:half], bench.blocks).wait(),
            "both": lambda: wait_for(
                bench.device.load(bench.segments[:half], bench.blocks), bench.device.save(others[half:], bench.blocks)
            ),
        },
    )
    bench.close()
    return {
        "load_vs_dma": ratios(timed["to_gpu"], timed["load"]),
        "save_vs_dma": ratios(timed["to_host"], timed["save"]),
        "both_ways": [2 * ratio for ratio in ratios(timed["load_half"], timed["both"])],
    }


def half_skipped(chunks: int, repeats: int) -> dict[str, list[float]]:
    bench = Bench(1)
    timed = in_turn(
        10 * repeats,
        {
            "all": lambda: bench.device.load(bench.segments, bench.blocks).wait(),
            "half": lambda: bench.device.load(bench.segments, bench.blocks, CHUNK // 2).wait(),
        },
    )
    bench.close()
    return {"half_skipped": ratios(timed["half"], timed["all"])}


def on_the_gpu(chunks: int, repeats: int) -> dict[str, list[float]]:
    bench = Bench(min(chunks, 8))  # what one launch takes, and more than the GPU's cache holds
    staging, other = (torch.zeros(bench.arena.numel(), dtype=torch.uint8, device="cuda") for _ in range(2))
    kernel = StagedKernel(bench, staging)
    in_order, any_order = np.arange(len(bench.blocks)), np.random.default_rng(1).permutation(len(bench.blocks))
    timed = in_turn(
        repeats,
        {
            "copy": lambda: other.copy_(staging),
            "contiguous": kernel.of_blocks(in_order),
            "scattered": kernel.of_blocks(any_order),
        },
        on_gpu=True,
    )
    bench.close()
    return {
        "scatter_vs_copy": ratios(timed["copy"], timed["contiguous"]),
        "scattered_vs_contiguous": ratios(timed["contiguous"], timed["scattered"]),
    }


def beside_torch(chunks: int, repeats: int) -> dict[str, list[float]]:
    """One chunk in GPU memory, written to pages by the kernel, and layer by layer with torch."""
    bench = Bench(1, "kv_first")
    staging = torch.zeros(LAYOUT.shard_bytes, dtype=torch.uint8, device="cuda")
    staged = staging.view(torch.bfloat16).reshape(LAYERS, 2, CHUNK, HEADS, WIDTH)
    slots = torch.arange(CHUNK, device="cuda")

    def by_torch() -> None:
        cos_old, sin_old = bench.cos_sin[slots + MOVED].chunk(2, 1)
        cos_new, sin_new = bench.cos_sin[slots].chunk(2, 1)
        cos = (cos_new * cos_old + sin_new * sin_old)[:, None]
        sin = (sin_new * cos_old - cos_new * sin_old)[:, None]
        for layer, pages in enumerate(bench.pages):
            one, other = staged[layer, 0].float().chunk(2, 2)
            rotated = torch.cat([one * cos - other * sin, other * cos + one * sin], 2).bfloat16()
            pages[0].view(-1, HEADS, WIDTH).index_copy_(0, slots, rotated)
            pages[1].view(-1, HEADS, WIDTH).index_copy_(0, slots, staged[layer, 1])

    kernel = StagedKernel(bench, staging)
    timed = in_turn(10 * repeats, {"torch": by_torch, "kernel": kernel.of_blocks(bench.blocks)}, on_gpu=True)
    bench.close()
    return {"vs_index_copy": ratios(timed["torch"], timed["kernel"])}


class Bench:
    """A device between pages in GPU memory and a pinned arena, with the segments of ``chunks`` moved chunks."""

    def __init__(self, chunks: int, format: PageFormat = "packed_heads") -> None:
        from blendhub_cuda.device import CudaDevice
        from blendhub_cuda.options import CudaOptions

        n_blocks = chunks * CHUNK // BLOCK
        shape = (2, n_blocks, BLOCK, HEADS, WIDTH) if format == "kv_first" else (n_blocks, HEADS, BLOCK, 2 * WIDTH)
        self.pages = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
        angles = torch.outer(torch.arange(POSITIONS), 10_000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float().cuda()
        rotation = Rotation(self.cos_sin, True)
        self.layers = [PagedLayer(f"layer {n}", format, (one,), rotation) for n, one in enumerate(self.pages)]
        self.device = CudaDevice(CudaOptions())
        self.device.attach(self.layers, BLOCK, LAYOUT)
        self.arena = torch.zeros(chunks * LAYOUT.shard_bytes, dtype=torch.uint8)
        self.device.pin(self.arena.numpy())
        self.blocks = np.arange(n_blocks)
        self.segments = [
            Segment(Span(at, at + CHUNK), number * LAYOUT.shard_bytes, 0, at + MOVED)
            for number, at in enumerate(range(0, chunks * CHUNK, CHUNK))
        ]

    def close(self) -> None:
        self.device.close()


class StagedKernel:
    """The device's kernel alone, from chunks in GPU memory to pages, on the engine's stream."""

    def __init__(self, bench: Bench, staging: torch.Tensor) -> None:
        from blendhub_cuda.launcher import Launcher
        from blendhub_cuda.pages import read_pages
        from blendhub_cuda.runtime import CudaRuntime
        from blendhub_cuda.tiles import TilePlanner

        self._bench = bench
        self._staging = staging
        self._planner = TilePlanner(LAYOUT, BLOCK, staging.numel() + 2**20)
        runtime = CudaRuntime(staging.device)
        pages = read_pages(bench.layers, BLOCK, LAYOUT)
        self._launcher = Launcher(runtime, pages, self._planner, BLOCK)

    def of_blocks(self, blocks: Any) -> Callable[[], object]:
        """A launch that writes all chunks to these blocks."""
        (group,) = self._planner.batch_groups(self._bench.segments, blocks, 0, True)
        (batch,) = group.batches
        table = torch.from_numpy(group.table.view(np.uint8).reshape(-1)).cuda()
        stream = torch.cuda.current_stream()
        return lambda: self._launcher.rows_to_pages(stream, self._staging, table, group, batch)


def in_turn(repeats: int, jobs: Mapping[str, Callable[[], object]], on_gpu: bool = False) -> dict[str, list[float]]:
    """Seconds of each job, repeated in turn; the first round warms up. ``on_gpu``: without the host's time."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 1):
        for name, job in jobs.items():
            found[name].append(gpu_seconds(job) if on_gpu else host_seconds(job))
    return {name: seconds[1:] for name, seconds in found.items()}


def host_seconds(job: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    job()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def gpu_seconds(job: Callable[[], object]) -> float:
    """Between two events of the stream. A sleep before them lets the host submit all work in advance."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)
    start.record()
    job()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def wait_for(*transfers: Any) -> None:
    for transfer in transfers:
        transfer.wait()


def ratios(above: list[float], below: list[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


if __name__ == "__main__":
    main()
