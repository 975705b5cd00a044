"""Transfers between the arena and an accelerator's pages, beside one pinned copy: for every device with streams.

The KV is that of a model of 32 layers, each with 8 heads of 128 numbers in bfloat16, in chunks of 256 tokens, 32 MiB
each.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.report import Planned
from blendhub import Span
from blendhub.contracts import PagedLayer, PageFormat, Rotation, Segment
from blendhub.core.layout import KVLayout
from blendhub.devices import StreamDevice

LAYERS, HEADS, WIDTH, CHUNK = 32, 8, 128, 256
POSITIONS = 32_768
LAYOUT = KVLayout(layers=LAYERS, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="bfloat16", chunk_tokens=CHUNK)
MOVED = 1000
"""The distance between the keys' old and new positions."""

BARS = {
    "load_vs_dma": Planned("a load with rotation, to the rate of one pinned copy", "x", 0.90, "higher"),
    "save_vs_dma": Planned("a save, to the rate of one pinned copy", "x", 0.90, "higher"),
    "half_skipped": Planned("a load of a chunk with half of it skipped, to all of it", "of its time", 0.60),
    "both_ways": Planned("loads and saves at once, to loads alone", "x its rate", 1.5, "higher"),
    "load_gb_s": Planned("a load with rotation", "GB/s", better="higher"),
    "save_gb_s": Planned("a save", "GB/s", better="higher"),
}


class Bench:
    """A device between pages in an accelerator's memory and an arena, with the segments of ``chunks`` moved chunks."""

    def __init__(self, device: StreamDevice, chunks: int, format: PageFormat, block: int) -> None:
        self.place = device.torch_type
        n_blocks = chunks * CHUNK // block
        shapes: dict[str, list[tuple[int, ...]]] = {
            "packed_heads": [(n_blocks, HEADS, block, 2 * WIDTH)],
            "split": [(n_blocks, block, HEADS, WIDTH)] * 2,
        }
        self.pages = [
            tuple(torch.zeros(shape, dtype=torch.bfloat16, device=self.place) for shape in shapes[format])
            for _ in range(LAYERS)
        ]
        angles = torch.outer(torch.arange(POSITIONS), 10_000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float().to(self.place)
        rotation = Rotation(self.cos_sin, True)
        self.layers = [PagedLayer(f"layer {n}", format, one, rotation) for n, one in enumerate(self.pages)]
        self.device = device
        self.device.attach(self.layers, block, LAYOUT)
        self.arena = torch.zeros(chunks * LAYOUT.shard_bytes, dtype=torch.uint8)
        self.device.pin(self.arena.numpy())
        self.device.wait_until_pinned()
        self.blocks = np.arange(n_blocks)
        self.segments = [
            Segment(Span(at, at + CHUNK), number * LAYOUT.shard_bytes, 0, at + MOVED)
            for number, at in enumerate(range(0, chunks * CHUNK, CHUNK))
        ]

    def close(self) -> None:
        self.device.close()


MakeBench = Callable[[int], Bench]


def over_the_bus(make: MakeBench, chunks: int, repeats: int) -> dict[str, list[float]]:
    bench = make(chunks)
    half = chunks // 2
    there = torch.empty_like(bench.arena, device=bench.place)
    here = torch.empty(bench.arena.numel(), dtype=torch.uint8, pin_memory=True)
    others = [Segment(one.span, one.shard, 0, one.span.start) for one in bench.segments]
    timed = in_turn(
        partial(seconds_on, bench.place),
        repeats,
        {
            "to_device": lambda: there.copy_(here, non_blocking=True),
            "to_host": lambda: here.copy_(there, non_blocking=True),
            "load": lambda: bench.device.load(bench.segments, bench.blocks).wait(),
            "save": lambda: bench.device.save(others, bench.blocks).wait(),
            "load_half": lambda: bench.device.load(bench.segments[:half], bench.blocks).wait(),
            "both": lambda: _wait_for(
                bench.device.load(bench.segments[:half], bench.blocks), bench.device.save(others[half:], bench.blocks)
            ),
        },
    )
    bench.close()
    return {
        "load_vs_dma": ratios(timed["to_device"], timed["load"]),
        "save_vs_dma": ratios(timed["to_host"], timed["save"]),
        "both_ways": [2 * ratio for ratio in ratios(timed["load_half"], timed["both"])],
        "load_gb_s": [bench.arena.nbytes / seconds / 1e9 for seconds in timed["load"]],
        "save_gb_s": [bench.arena.nbytes / seconds / 1e9 for seconds in timed["save"]],
    }


def half_skipped(make: MakeBench, repeats: int) -> dict[str, list[float]]:
    bench = make(1)
    timed = in_turn(
        partial(seconds_on, bench.place),
        10 * repeats,
        {
            "all": lambda: bench.device.load(bench.segments, bench.blocks).wait(),
            "half": lambda: bench.device.load(bench.segments, bench.blocks, CHUNK // 2).wait(),
        },
    )
    bench.close()
    return {"half_skipped": ratios(timed["half"], timed["all"])}


def in_turn(
    seconds_of: Callable[[Callable[[], object]], float], repeats: int, jobs: Mapping[str, Callable[[], object]]
) -> dict[str, list[float]]:
    """Seconds of each job, repeated in turn; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 1):
        for name, job in jobs.items():
            found[name].append(seconds_of(job))
    return {name: seconds[1:] for name, seconds in found.items()}


def ratios(above: list[float], below: list[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def seconds_on(place: str, job: Callable[[], object]) -> float:
    accelerator = torch.get_device_module(place)
    accelerator.synchronize()
    start = time.perf_counter()
    job()
    accelerator.synchronize()
    return time.perf_counter() - start


def _wait_for(*transfers: Any) -> None:
    for transfer in transfers:
        transfer.wait()
