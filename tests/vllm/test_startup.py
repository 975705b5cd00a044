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
TOKEN = 128 * 1024
GIB = 2**30
OWN = "BlendHub: text is reused anywhere; embedded hub in a thread"
EMBEDDED = EmbeddedHubConfig(embedded="thread")


def facts(**changes) -> StartupFacts:
    given: dict[str, Any] = {
        "settings": Settings(hub=EMBEDDED),
        "blends": True,
        "role": "kv_both",
        "max_model_len": 8192,
        "namespace": SPACE,
        "finds_prefixes": True,
    }
    return StartupFacts(**given | changes)


def said(facts: StartupFacts, arena: int = 5 * GIB) -> tuple[list[str], list[str]]:
    """The lines of INFO, and those of WARNING."""
    by_level: dict[int, list[str]] = {logging.INFO: [], logging.WARNING: []}
    for line in lines(facts, ArenaProgress(arena, arena)):
        by_level[line.level].append(line.text)
    return by_level[logging.INFO], by_level[logging.WARNING]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("arena", [0, 1, 255 * TOKEN, 256 * TOKEN, 5 * GIB, int(5.1 * GIB)])
def test_tokens_are_those_of_whole_slots_of_all_ranks(arena, ranks):
    space = msgspec.structs.replace(SPACE, world_size=ranks)
    tokens = tokens_of(arena, space)
    assert tokens % 256 == 0
    assert tokens * TOKEN * ranks <= arena < (tokens + 256) * TOKEN * ranks


def test_the_line_gives_the_arena_in_bytes_and_tokens():
    line = f"{OWN}; arena 5.0 GiB: about 40,960 tokens of this model; blended KV is stored, too"
    assert said(facts()) == ([line], [])
    for changes, what in (
        ({"blends": False}, "exact prefixes are reused"),
        ({"settings": Settings(mode="off")}, "nothing is reused unless a request asks for it, as the mode says"),
        ({"role": "kv_producer"}, "text is stored, and none reused, as kv_role says"),
    ):
        (line,), _ = said(facts(**changes))
        assert line.startswith(f"BlendHub: {what}; ")
    (line,), _ = said(facts(settings=Settings(endpoint="ipc:///x")), 225 * 2**20)
    assert "; hub at ipc:///x; arena 225 MiB: about 1,792 tokens of this model" in line


@pytest.mark.parametrize(
    "arena, changes, what",
    [
        (5 * GIB, {}, "is stored, too"),
        (4 * GIB - 1, {}, "is not stored: the arena holds less than 4 prompts of max_model_len 8,192; set "
         "kv_connector_extra_config.blendhub.hub.arena_gib to at least 4.0, or "
         "kv_connector_extra_config.blendhub.store_blended to true"),
        (GIB, {"settings": Settings(store_blended=True)}, "is stored, too"),
        (5 * GIB, {"settings": Settings(store_blended=False)}, "is not stored: store_blended is false"),
        (5 * GIB, {"finds_prefixes": False, "settings": Settings(matchers=(PluginChoice("separator"),))},
         'is not stored: none of the matchers (separator) finds prefixes; add {"name": "prefix"} to '
         "kv_connector_extra_config.blendhub.matchers"),
        (5 * GIB, {"blends": False}, None),
        (5 * GIB, {"role": "kv_producer"}, None),
    ],
)  # fmt: skip
def test_the_line_says_whether_blended_kv_is_stored_and_why_not(arena, changes, what):
    (line,), _ = said(facts(**changes), arena)
    assert line.endswith(f"tokens of this model; blended KV {what}" if what else "tokens of this model")


@pytest.mark.parametrize(
    "settings, key",
    [
        (Settings(), "set kv_connector_extra_config.blendhub.hub.arena_gib to at least"),
        (Settings(endpoint="ipc:///x"), "set arena_gib of that hub to at least"),
    ],
    ids=["own", "shared"],
)
def test_an_arena_that_does_not_hold_one_prompt_is_a_warning_that_names_the_key(settings, key):
    small = facts(settings=settings, max_model_len=131_072)
    _, (warning,) = said(small, 225 * 2**20)
    assert "holds 1,792 tokens, less than one prompt of max_model_len 131,072" in warning and key in warning
    advised = float(warning.split("at least ")[1].split(",")[0])
    assert said(small, 131_072 * TOKEN)[1] == [] and len(said(small, 131_072 * TOKEN - 1)[1]) == 1
    assert said(small, int(advised * GIB))[1] == []
    assert EmbeddedHubConfig(arena_gib=advised).arena_gib == 16.0


def test_an_arena_that_is_still_being_reserved_is_described_as_it_will_be():
    (line,) = lines(facts(), ArenaProgress(GIB, 5 * GIB))
    assert "; arena 5.0 GiB (1.0 GiB of them reserved so far): about 40,960 tokens of this model" in line.text


def test_where_not_one_chunk_fits_the_line_names_the_flag_of_the_container():
    _, (warning,) = said(facts(), 31 * 2**20)
    assert "not one chunk of this model fits: 256 tokens take 32 MiB, and the arena has 31 MiB, of " in warning
    assert "--shm-size=16g" in warning and "an emptyDir volume with medium: Memory at /dev/shm" in warning
    _, (warning,) = said(facts(settings=Settings(endpoint="ipc:///x")), 31 * 2**20)
    assert "--shm-size" not in warning and "set arena_gib of that hub" in warning


def test_a_ratio_that_the_policy_forbids_is_a_warning():
    _, (warning,) = said(facts(settings=Settings(recompute_ratio=1.0)))
    assert "recompute_ratio 1.0 is above policy.max_recompute_share 0.8" in warning
    assert said(facts(settings=Settings(recompute_ratio=1.0, policy=ReusePolicy(max_recompute_share=1.0))))[1] == []
