"""The Ascend device's rates relative to one pinned copy. Without an NPU, every row is missing."""

from importlib.util import find_spec

from benchmarks.bus import BARS, Bench, half_skipped, over_the_bus, rows_of
from benchmarks.report import arguments, finish

BLOCK = 128
"""The block size of vllm-ascend."""


def main() -> None:
    options = arguments(__doc__ or "")
    measured = measure(4 if options.quick else 16, 3 if options.quick else 9) if has_npu() else {}
    packages = ["python", "torch", "torch_npu", "blendhub", "blendhub-ascend"]
    finish("npu", rows_of(BARS, measured, "npu_"), packages, options.json)


def has_npu() -> bool:
    if not find_spec("torch_npu"):
        return False
    import torch_npu

    return bool(torch_npu.npu.is_available())


def measure(chunks: int, repeats: int) -> dict[str, list[float]]:
    return {**over_the_bus(make_bench, chunks, repeats), **half_skipped(make_bench, repeats)}


def make_bench(chunks: int) -> Bench:
    from blendhub_ascend import AscendOptions
    from blendhub_ascend.device import create

    return Bench(create(AscendOptions()), chunks, "split", BLOCK)


if __name__ == "__main__":
    main()
