"""What the log says when an engine has met its hub: what is reused, with how much room, and what keeps it from more."""

import logging
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from blendhub.contracts import ArenaProgress
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm.scheduler.startup import StartupFacts, lines, tokens_of
from blendhub.vllm.settings import EmbeddedHubConfig, ReusePolicy, Settings

LAYOUT = KVLayout(layers=32, kv_heads=8, key_dim=128, value_dim=128, dtype="bfloat16", chunk_tokens=256)
SPACE = Namespace(model="m", layout=LAYOUT)
TOKEN, MIB, GIB = 128 * 1024, 2**20, 2**30


def said(arena: int = 5 * GIB, *, reserved: int | None = None, **changes: Any) -> tuple[str, list[str]]:
    """The line of INFO, and those of WARNING."""
    usual = {"blends": True, "role": "kv_both", "max_model_len": 8192, "namespace": SPACE, "finds_prefixes": True}
    own = Settings(hub=EmbeddedHubConfig(embedded="thread"))
    facts = StartupFacts(**{"settings": own, **usual, **changes})
    progress = ArenaProgress(arena if reserved is None else reserved, arena)
    by_level: dict[int, list[str]] = {logging.INFO: [], logging.WARNING: []}
    for line in lines(facts, progress):
        by_level[line.level].append(line.text)
    return (by_level[logging.INFO] or [""])[0], by_level[logging.WARNING]


def test_the_line_gives_the_arena_in_bytes_and_in_tokens_of_whole_slots_of_all_ranks():
    line = (
        "BlendHub: text is reused anywhere; embedded hub in a thread; arena 5.0 GiB: about 40,960 tokens of this model"
    )
    assert said() == (f"{line}; blended KV is stored, too", [])
    assert "; hub at ipc:///x; arena 225 MiB: about 1,792 tokens" in said(
        225 * MIB, settings=Settings(endpoint="ipc:///x")
    )[0]  # fmt: skip
    assert "; arena 5.0 GiB (1.0 GiB of them reserved so far): about 40,960 tokens" in said(reserved=GIB)[0]
    for ranks in (1, 4):
        space = msgspec.structs.replace(SPACE, world_size=ranks)
        for arena in (0, 1, 255 * TOKEN, 256 * TOKEN, 5 * GIB, int(5.1 * GIB)):
            tokens = tokens_of(arena, space)
            assert tokens % 256 == 0 and tokens * TOKEN * ranks <= arena < (tokens + 256) * TOKEN * ranks


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"blends": False}, "exact prefixes are reused; "),
        ({"settings": Settings(mode="off")}, "nothing is reused unless a request asks for it, as the mode says; "),
        ({"role": "kv_producer"}, "text is stored, and none reused, as kv_role says; "),
    ],
)
def test_the_line_says_what_is_reused(changes, what):
    assert said(**changes)[0].startswith(f"BlendHub: {what}")


@pytest.mark.parametrize(
    "arena, changes, what",
    [
        (4 * GIB - 1, {}, "is not stored: the arena holds less than 4 prompts of max_model_len 8,192; set "
         "kv_connector_extra_config.blendhub.hub.arena_gib to at least 4.0, or "
         "kv_connector_extra_config.blendhub.store_blended to true"),
        (GIB, {"settings": Settings(store_blended=True)}, "is stored, too"),
        (5 * GIB, {"settings": Settings(store_blended=False)}, "is not stored: store_blended is false"),
        (5 * GIB, {"finds_prefixes": False, "settings": Settings(matchers=(PluginChoice("separator"),))},
         'is not stored: none of the matchers (separator) finds prefixes; add {"name": "prefix"} to '
         "kv_connector_extra_config.blendhub.matchers"),
        (5 * GIB, {"blends": False}, None),
    ],
)  # fmt: skip
def test_the_line_says_whether_blended_kv_is_stored_and_why_not(arena, changes, what):
    line, _ = said(arena, **changes)
    assert line.endswith(f"tokens of this model; blended KV {what}" if what else "tokens of this model")


@pytest.mark.parametrize(
    "settings, key",
    [(Settings(), "set kv_connector_extra_config.blendhub.hub.arena_gib"),
     (Settings(endpoint="ipc:///x"), "set arena_gib of that hub")],
    ids=["own", "shared"],
)  # fmt: skip
def test_an_arena_that_holds_too_little_is_a_warning_that_names_the_key_or_the_container_s_flag(settings, key):
    small = {"settings": settings, "max_model_len": 131_072}
    _, (warning,) = said(225 * MIB, **small)
    assert "holds 1,792 tokens, less than one prompt of max_model_len 131,072" in warning
    assert f"{key} to at least" in warning
    advised = float(warning.split("at least ")[1].split(",")[0])
    assert said(int(advised * GIB), **small)[1] == said(131_072 * TOKEN, **small)[1] == []
    assert len(said(131_072 * TOKEN - 1, **small)[1]) == 1
    _, (warning,) = said(31 * MIB, settings=settings)
    if settings.endpoint:
        assert "--shm-size" not in warning and key in warning
    else:
        assert "not one chunk of this model fits: 256 tokens take 32 MiB, and the arena has 31 MiB, of " in warning
        assert "--shm-size=16g" in warning and "an emptyDir volume with medium: Memory at /dev/shm" in warning


def test_a_ratio_that_the_policy_forbids_is_a_warning():
    _, (warning,) = said(settings=Settings(recompute_ratio=1.0))
    assert "recompute_ratio 1.0 is above policy.max_recompute_share 0.8" in warning
    assert said(settings=Settings(recompute_ratio=1.0, policy=ReusePolicy(max_recompute_share=1.0)))[1] == []
