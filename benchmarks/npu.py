"""The Ascend device's rates relative to one pinned copy. Without an NPU, every row is missing."""

from importlib.util import find_spec

from benchmarks.bus import BARS, Bench, half_skipped, over_the_bus
from benchmarks.report import arguments, finish, rows_of

BLOCK = 128
"""The block size of vllm-ascend."""


def main() -> None:
    options = arguments(__doc__ or "")
    measured = measure(4 if options.quick else 16, 3 if options.quick else 9) if has_npu() else {}
    rows = rows_of({f"npu_{id}": one for id, one in BARS.items()}, measured)
    packages = ["python", "torch", "torch_npu", "blendhub", "blendhub-ascend"]
    finish("npu", rows, packages, options.json)


def has_npu() -> bool:
    if not find_spec("torch_npu"):
        return False
    import torch_npu

    return bool(torch_npu.npu.is_available())


def measure(chunks: int, repeats: int) -> dict[str, list[float]]:
    found = over_the_bus(make_bench, chunks, repeats) | half_skipped(make_bench, repeats)
    return {f"npu_{id}": values for id, values in found.items()}


def make_bench(chunks: int) -> Bench:
    from blendhub_ascend import AscendOptions
    from blendhub_ascend.device import create

    return Bench(create(AscendOptions()), chunks, "split", BLOCK)


if __name__ == "__main__":
    main()
