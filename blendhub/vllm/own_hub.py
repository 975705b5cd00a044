"""The hub that an engine starts for itself, and how large its arena is beside those of the engine's neighbours."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.host import PluginHost
from blendhub.hub.embedded import EmbeddedHub, embedded_hub
from blendhub.hub.memory.default_size import default_arena_bytes
from blendhub.vllm.settings import EmbeddedHubConfig

log = logging.getLogger(__name__)
TITLE = b"::EngineCore_DP"
"""What vLLM writes into the titles of the processes of data-parallel engines."""


def start_own_hub(config: EmbeddedHubConfig, host: PluginHost, transport: PluginChoice) -> EmbeddedHub:
    """An embedded hub, whose arena by default is this engine's share of what one alone on the machine would have."""
    where = config.embedded
    assert where
    engines = engines_of_this_host()
    if engines > 1 and not config.arena_gib:
        config = replace(config, arena_gib=default_arena_bytes(engines) / 2**30)
        log.info(
            "BlendHub: each of %d data-parallel engines of this machine has a hub, so its arena has %.1f GiB; they "
            "share one, and what is stored in it, if all name the endpoint of one `blendhub serve`",
            engines, config.arena_gib,
        )  # fmt: skip
    return embedded_hub(config, where, host, transport)


def engines_of_this_host(process: int | None = None) -> int:
    """The data-parallel engines that were started beside this one.

    vLLM configures an engine of a dense model as if it were alone; but all were started by one process, and their
    titles say what they are.
    """
    pid = process or os.getpid()
    if not _is_data_parallel(pid):
        return 1
    children: list[str] = []
    for file in Path(f"/proc/{_parent_of(pid)}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            children += file.read_text(encoding="ascii").split()
    return max(1, sum(_is_data_parallel(int(child)) for child in children))


def _parent_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))


def _is_data_parallel(pid: int) -> bool:
    try:
        return TITLE in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False
