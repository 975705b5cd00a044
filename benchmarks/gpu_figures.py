"""What only a GPU can tell: figures without a bar, beside the device's rates.

Most belong to estimates that the design rests on: plugins/cuda/README.md says which.
"""

import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.bus import HEADS, MOVED, WIDTH, Bench
from benchmarks.report import Planned, Row, rows_of
from blendhub import Span
from blendhub.contracts import PagedLayer, Rotation, Segment
from blendhub.core.layout import KVLayout

FIGURES = {
    "contexts_gpu_0": Planned("contexts on the first GPU of a process that serves the second one", ""),
    "rotation_error_bf16": Planned(
        "keys in bfloat16, rotated, beside keys computed there; the start-up check allows 0.04",
        "",
    ),
    "rotation_error_fp8": Planned("the same of 8-bit floats; the start-up check allows 0.2", ""),
    "loads_beside_prefill": Planned("three loads while the GPU multiplies matrices, to the loads alone", "x the time"),
    "prefill_beside_loads": Planned("the multiplication beside the loads, to the same alone", "x the time"),
}
Found = dict[str, list[float]]


def rows(make: Callable[[int], Bench], repeats: int) -> list[Row]:
    return rows_of(FIGURES, _measured(make, repeats) if torch.cuda.is_available() else {})


def _measured(make: Callable[[int], Bench], repeats: int) -> Found:
    errors = {"bf16": "bfloat16", "fp8": "float8_e4m3"}
    found = {f"rotation_error_{name}": [_rotation_error(dtype)] for name, dtype in errors.items()}
    if torch.cuda.device_count() > 1:
        found["contexts_gpu_0"] = [_contexts_on_the_first_gpu()]
    return found | _beside_prefill(make, repeats)


def _contexts_on_the_first_gpu() -> float:
    """The contexts of another process, which loads and saves on the second GPU."""
    script = (
        "from benchmarks.gpu_figures import load_and_save; import torch; load_and_save(torch.device('cuda', 1)); "
        "print('ready', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline().strip() == "ready"
        query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader", "-i", "0"]
        listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
        process.communicate("\n")
    return float(listed.count(str(process.pid)))


def load_and_save(place: torch.device) -> torch.Tensor:
    """Keys that were stored at one place and loaded to another, by the threads that serving has."""
    return _moved_keys(place, "bfloat16")[0]


def _rotation_error(dtype: str) -> float:
    """The rotation error as the start-up check measures it: the largest difference, relative to the largest number."""
    found, expected = _moved_keys(torch.device("cuda", 0), dtype)
    return float((found - expected).abs().max() / expected.abs().max())


def _moved_keys(place: torch.device, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that were saved, and loaded ``MOVED`` positions further on, beside those of a model there."""
    from blendhub_cuda import CudaOptions
    from blendhub_cuda.device import CudaDevice

    n, block = 256, 16
    kind = {"bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}[dtype]
    layout = KVLayout(layers=1, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype=dtype, chunk_tokens=n)
    angles = torch.outer(torch.arange(2 * MOVED), 10_000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)))
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float().to(place)
    keys = torch.randn(n, HEADS, WIDTH, generator=torch.Generator().manual_seed(1)).to(place)

    def at(start: int) -> torch.Tensor:
        cos, sin = cos_sin[start : start + n, None].chunk(2, -1)
        one, other = keys.chunk(2, -1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    pages = torch.zeros(2 * n // block, HEADS, block, 2 * WIDTH, device=place).to(kind)
    pages[: n // block, :, :, :WIDTH] = at(0).view(-1, block, HEADS, WIDTH).transpose(1, 2).to(kind)
    device = CudaDevice(CudaOptions())
    device.attach([PagedLayer("layer", "packed_heads", (pages,), Rotation(cos_sin, True))], block, layout)
    arena = np.zeros(layout.shard_bytes, np.uint8)
    device.pin(arena)
    device.wait_until_pinned()
    stored = Segment(Span(0, n), 0, 0, 0)
    device.save([stored], np.arange(n // block)).wait()
    # A table whose first blocks are not read: the segment begins at its position there.
    table = np.concatenate([np.zeros(-(-MOVED // block), np.int64), np.arange(n // block, 2 * n // block)])
    start = -(-MOVED // block) * block
    device.load([Segment(Span(start, start + n), 0, 0, 0)], table).wait()
    device.close()
    found = pages[n // block :, :, :, :WIDTH].float().transpose(1, 2).reshape(n, HEADS, WIDTH)
    return found, at(start)


def _beside_prefill(make: Callable[[int], Bench], repeats: int) -> Found:
    """Three loads begin together, as of three requests; products of matrices keep the GPU busy as a prefill does."""
    bench = make(12)
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

    found: Found = {"loads_beside_prefill": [], "prefill_beside_loads": []}
    for repeat in range(repeats + 1):
        (alone, _), (_, prefill), both = timed(True, False), timed(False, True), timed(True, True)
        if repeat:  # the first round warms up
            found["loads_beside_prefill"].append(both[0] / alone)
            found["prefill_beside_loads"].append(both[1] / prefill)
    bench.close()
    return found
