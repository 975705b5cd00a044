"""The CUDA device's rates relative to the limits of the bus and of GPU memory. Without a GPU, every row is missing.

Everything is a ratio of two things measured in turn, in one run, with the KV that ``benchmarks.bus`` describes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import bus, gpu_arena, gpu_figures
from benchmarks.bus import (
    CHUNK,
    HEADS,
    LAYERS,
    LAYOUT,
    MOVED,
    WIDTH,
    Bench,
    half_skipped,
    in_turn,
    over_the_bus,
    ratios,
)
from benchmarks.report import Planned, arguments, finish, rows_of
from blendhub.contracts import PageFormat
from blendhub.devices import BatchPlanner, read_pages

BLOCK = 16

BARS = {
    **bus.BARS,
    "scatter_vs_copy": Planned("the kernel from staging to pages, rotating, to a copy on the GPU", "x", 0.80, "higher"),
    "scattered_vs_contiguous": Planned("the same with blocks in any order, to blocks in order", "x", 0.70, "higher"),
    "vs_index_copy": Planned("a chunk by torch, layer by layer, to the kernel's time", "x", 5.0, "higher"),
}


def main() -> None:
    options = arguments(__doc__ or "")
    chunks, repeats = (4, 3) if options.quick else (16, 9)
    measured = measure(chunks, repeats) if torch.cuda.is_available() else {}
    rows = rows_of(BARS, measured) + gpu_figures.rows(make_bench, repeats) + gpu_arena.rows()
    finish("device", rows, ["python", "torch", "triton", "blendhub", "blendhub-cuda"], options.json)


def measure(chunks: int, repeats: int) -> dict[str, list[float]]:
    """Each row's values, one for each repetition."""
    found: dict[str, list[float]] = {}
    for part in (
        lambda: over_the_bus(make_bench, chunks, repeats),
        lambda: half_skipped(make_bench, repeats),
        lambda: on_the_gpu(chunks, repeats),
        lambda: beside_torch(repeats),
    ):
        found |= part()
        torch.cuda.empty_cache()
    return found


def make_bench(chunks: int, format: PageFormat = "packed_heads") -> Bench:
    from blendhub_cuda import CudaOptions
    from blendhub_cuda.device import CudaDevice

    return Bench(CudaDevice(CudaOptions()), chunks, format, BLOCK)


def on_the_gpu(chunks: int, repeats: int) -> dict[str, list[float]]:
    bench = make_bench(min(chunks, 8))  # more than the GPU's cache holds
    staging, other = (torch.zeros(bench.arena.numel(), dtype=torch.uint8, device="cuda") for _ in range(2))
    kernel = StagedKernel(bench, staging)
    in_order, any_order = np.arange(len(bench.blocks)), np.random.default_rng(1).permutation(len(bench.blocks))
    timed = in_turn(
        gpu_seconds,
        repeats,
        {
            "copy": lambda: other.copy_(staging),
            "contiguous": kernel.of_blocks(in_order),
            "scattered": kernel.of_blocks(any_order),
        },
    )
    bench.close()
    return {
        "scatter_vs_copy": ratios(timed["copy"], timed["contiguous"]),
        "scattered_vs_contiguous": ratios(timed["contiguous"], timed["scattered"]),
    }


def beside_torch(repeats: int) -> dict[str, list[float]]:
    """One chunk in GPU memory, written to pages by the kernel, and layer by layer with torch."""
    bench = make_bench(1, "split")
    staging = torch.zeros(LAYOUT.shard_bytes, dtype=torch.uint8, device="cuda")
    staged = staging.view(torch.bfloat16).reshape(LAYERS, 2, CHUNK, HEADS, WIDTH)
    slots = torch.arange(CHUNK, device="cuda")

    def by_torch() -> None:
        cos_old, sin_old = bench.cos_sin[slots + MOVED].chunk(2, 1)
        cos_new, sin_new = bench.cos_sin[slots].chunk(2, 1)
        cos = (cos_new * cos_old + sin_new * sin_old)[:, None]
        sin = (sin_new * cos_old - cos_new * sin_old)[:, None]
        for layer, (keys, values) in enumerate(bench.pages):
            one, other = staged[layer, 0].float().chunk(2, 2)
            rotated = torch.cat([one * cos - other * sin, other * cos + one * sin], 2).bfloat16()
            keys.view(-1, HEADS, WIDTH).index_copy_(0, slots, rotated)
            values.view(-1, HEADS, WIDTH).index_copy_(0, slots, staged[layer, 1])

    kernel = StagedKernel(bench, staging)
    timed = in_turn(gpu_seconds, 10 * repeats, {"torch": by_torch, "kernel": kernel.of_blocks(bench.blocks)})
    bench.close()
    return {"vs_index_copy": ratios(timed["torch"], timed["kernel"])}


class StagedKernel:
    """The device's kernel alone, from chunks in GPU memory to pages, on the engine's stream."""

    def __init__(self, bench: Bench, staging: torch.Tensor) -> None:
        from blendhub_cuda.launcher import Launcher

        self._bench = bench
        self._staging = staging
        pages = read_pages(bench.layers, BLOCK, LAYOUT, bench.device.formats)
        self._launcher = Launcher(pages, LAYOUT, BLOCK)

    def of_blocks(self, blocks: Any) -> Callable[[], object]:
        """A launch for each chunk, which writes all of it to these blocks."""
        planner = BatchPlanner(LAYOUT, BLOCK, LAYOUT.shard_bytes + 2**20)
        launches = [
            partial(
                self._launcher.rows_to_pages,
                self._staging[number * LAYOUT.shard_bytes :],
                torch.from_numpy(batch.table.view(np.uint8).reshape(-1)).cuda(),
                batch,
            )
            for number, batch in enumerate(planner.batches(self._bench.segments, blocks, 0))
        ]
        return lambda: [launch() for launch in launches]


def gpu_seconds(job: Callable[[], object]) -> float:
    """The seconds of the GPU alone, between two events. A sleep before them lets the host submit all work early."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)
    start.record()
    job()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


if __name__ == "__main__":
    main()
