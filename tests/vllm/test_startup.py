"""What the log says when an engine has met its hub: what is reused, with how much room, and what keeps it from more."""

import logging
from typing import Any

import msgspec
import pytest

from blendhub.contracts import ArenaProgress
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.scheduler.startup import StartupFacts, lines, tokens_of
from blendhub.vllm.settings import EmbeddedHubConfig, Settings

LAYOUT = KVLayout(layers=32, kv_heads=8, key_dim=128, value_dim=128, dtype="bfloat16", chunk_tokens=256)
SPACE = Namespace(model="m", layout=LAYOUT)
SUPPORT, EXACT_ONLY = (ModelSupport((LAYOUT,), blends, ()) for blends in (True, False))
STATE = KVLayout(layers=9, kv_heads=1, key_dim=512, value_dim=0, dtype="int8", chunk_tokens=64)
WITH_STATES = msgspec.structs.replace(SPACE, state_layouts=(STATE,))
TOKEN, MIB, GIB = 128 * 1024, 2**20, 2**30
SHARED = {"settings": Settings(endpoint="ipc:///x")}
KEYS = "kv_connector_extra_config.blendhub"


def said(arena: int = 5 * GIB, *, reserved: int | None = None, **changes: Any) -> tuple[str, list[str]]:
    """The line of INFO, and those of WARNING."""
    usual = {"support": SUPPORT, "role": "kv_both", "max_model_len": 8192, "namespace": SPACE, "finds_prefixes": True}
    own = Settings(hub=EmbeddedHubConfig(embedded="thread"))
    progress = ArenaProgress(arena if reserved is None else reserved, arena)
    by_level: dict[int, list[str]] = {logging.INFO: [], logging.WARNING: []}
    for line in lines(StartupFacts(**{"settings": own, **usual, **changes}), progress):
        by_level[line.level].append(line.text)
    return "".join(by_level[logging.INFO]), by_level[logging.WARNING]


@pytest.mark.parametrize(
    "arena, changes, parts",
    [
        (5 * GIB, {}, ["text is reused anywhere; embedded hub in a thread; arena 5.0 GiB: about 40,960 tokens", "too"]),
        (225 * MIB, SHARED, ["; hub at ipc:///x; arena 225 MiB: about 1,792 tokens of this model"]),
        (5 * GIB, {"reserved": GIB}, ["; arena 5.0 GiB (1.0 GiB of them reserved so far): about 40,960 tokens"]),
        (5 * GIB, {"settings": Settings(donors="trusted")}, ["text of trusted donors is reused anywhere; "]),
        (5 * GIB, {"support": EXACT_ONLY}, ["exact prefixes are reused; ", "tokens of this model"]),
        (5 * GIB, {"support": EXACT_ONLY, "namespace": WITH_STATES},
         ["exact prefixes are reused; ", "about 40,960 tokens of this model, or 3 fewer for each state"]),
        (5 * GIB, {"settings": Settings(mode="off")}, ["nothing is reused unless a request asks for it, as the mode"]),
        (5 * GIB, {"role": "kv_producer"}, ["text is stored, and none reused, as kv_role says; "]),
        (4 * GIB - 1, {}, [f"blended KV is not stored: the arena holds less than 4 prompts of max_model_len 8,192; set "
                           f"{KEYS}.hub.arena_gib to at least 4.0, or ", f"{KEYS}.store_blended to true"]),
        (GIB, {"settings": Settings(store_blended=True)}, ["blended KV is stored, too"]),
        (5 * GIB, {"settings": Settings(store_blended=False)}, ["blended KV is not stored: store_blended is false"]),
        (5 * GIB, {"finds_prefixes": False, "settings": Settings(matchers=(PluginChoice("separator"),))},
         ["none of the matchers (separator) finds prefixes; add ", f"{KEYS}.matchers"]),
    ],
)  # fmt: skip
def test_the_line_says_what_is_reused_with_how_much_room_and_why_blended_kv_is_not_stored(arena, changes, parts):
    line, _ = said(arena, **changes)
    assert all(part in line for part in parts) and line.endswith(parts[-1] if len(parts) > 1 else "")


def test_tokens_are_those_of_whole_slots_with_the_kv_of_all_ranks_but_no_copies():
    for ranks, copies in ((1, 1), (4, 1), (4, 4)):
        space = msgspec.structs.replace(SPACE, world_size=ranks, copies=copies)
        for arena in (0, 1, 255 * TOKEN, 256 * TOKEN, 5 * GIB, int(5.1 * GIB)):
            tokens = tokens_of(arena, space)
            size = TOKEN * ranks // copies
            assert tokens % 256 == 0 and tokens * size <= arena < (tokens + 256) * size


@pytest.mark.parametrize("changes, key", [({}, f"set {KEYS}.hub.arena_gib"), (SHARED, "set arena_gib of that hub")])
def test_what_keeps_an_engine_from_reuse_is_a_warning_that_names_the_key_or_the_container_s_flag(changes, key):
    _, (warning,) = said(225 * MIB, max_model_len=131_072, **changes)
    assert "holds 1,792 tokens, less than one prompt of max_model_len 131,072" in warning
    advised = float(warning.split(f"{key} to at least ")[1].split(",")[0])
    assert said(int(advised * GIB), max_model_len=131_072, **changes)[1] == []
    assert len(said(131_072 * TOKEN - 1, max_model_len=131_072, **changes)[1]) == 1
    _, (warning,) = said(31 * MIB, **changes)
    flags = "--shm-size=16g" in warning, "an emptyDir volume with medium: Memory at /dev/shm" in warning
    assert flags == (not changes, not changes)
