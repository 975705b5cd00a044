"""Two copies of a text in the arena, compared by one rank's thread with a real hub and no device."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

import torch

from blendhub import PluginHost, Span
from blendhub.client.hub_client import HubClient
from blendhub.contracts import PagedLayer
from blendhub.core.layout import KVLayout, Namespace, Variant
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.vllm.messages import CopiesJob
from blendhub.vllm.model.rotary import rotated, rotations_of
from blendhub.vllm.worker.comparison import ComparedLayer, as_bytes, squares
from blendhub.vllm.worker.learning import Learning
from blendhub.vllm.worker.stored_copies import StoredCopies
from tests.vllm.stand_in_model import LONGEST, rotary
from tests.vllm.two_ranks import ALONE

HOST = PluginHost.discover()
HEADS, WIDTH, N, RANKS, AT = 2, 16, 100, 2, 2
LAYOUT = KVLayout(layers=3, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="float16", chunk_tokens=32)
BEFORE = np.arange(1000, 1045, dtype=np.uint32)
TEXT = np.arange(N, dtype=np.uint32)
PROMPT = np.concatenate([BEFORE, TEXT])
random = torch.Generator().manual_seed(1)
KV = torch.randn(2, 2, RANKS, N, HEADS, WIDTH, generator=random).half()
"""The KV of two copies: keys before their rotation and values, by rank."""

module = torch.nn.Module()
module.rotary = rotary(width=WIDTH)
ROTATION = rotations_of(module, WIDTH, LONGEST)[0]


def keys_at(positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return rotated(keys, ROTATION, torch.zeros_like(positions), positions).half()


@contextmanager
def clients():
    """A client of each rank."""
    with HubInThread(HubConfig(arena_gib=0.01, metrics=""), HOST) as hub:
        made = [HubClient(hub.inproc_endpoint, "inproc", {}, host=HOST) for _ in range(RANKS)]
        for rank, client in enumerate(made):
            client.register("e", Namespace(model="m", layout=LAYOUT, world_size=RANKS), rank)
        yield made
        for client in made:
            client.close()


def store(made: list[HubClient], tokens: np.ndarray, start: int, copy: int) -> None:
    """Store a copy of the text's KV, which begins at a position; all else is garbage."""
    reserved = made[0].reserve(tokens, Span(0, len(tokens)))
    for rank, client in enumerate(made):
        for slot in reserved.slots:
            shard = client.shard(slot.slot)
            shard[:] = 77
            at = torch.arange(min(max(slot.span.start, start), slot.span.end), slot.span.end)
            keys, values = (KV[copy, kind, rank, at - start] for kind in (0, 1))
            for part_at, rows in ((LAYOUT.keys_at(AT), keys_at(at, keys)), (LAYOUT.values_at(AT), values)):
                first = part_at + (int(at[0]) - slot.span.start) * LAYOUT.key_row_bytes if len(at) else 0
                shard[first : first + rows.nbytes] = rows.contiguous().view(torch.uint8).numpy().ravel()
        client.commit(reserved.right, len(tokens))


def copies_of(client: HubClient) -> tuple[StoredCopies, Learning]:
    learning = Learning(lambda work: None)
    layer = PagedLayer("layer", "packed_heads", (), ROTATION)
    compared = ComparedLayer(SimpleNamespace(), AT, layer, LAYOUT, ALONE)
    return StoredCopies(compared, lambda: client, learning), learning


def numbers(learning: Learning) -> tuple[int, int]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if any(found := learning.take_numbers()):
            return found
        time.sleep(0.01)
    raise AssertionError("nothing was compared")


def known(client: HubClient, prompt: np.ndarray) -> bytes:
    asked = client.submit_lookup(prompt, acquire=False, sensitivity=True)
    assert asked.result().matches
    return b"".join(asked.payload())


def expected() -> bytes:
    """Keys before their rotation differ as much as at one position, with the heads of all ranks."""
    one, other = KV.float().permute(0, 1, 3, 2, 4, 5).flatten(3, 4)
    return as_bytes(squares(tuple(other), tuple(one)), 1 / 64).numpy().astype(int)


def test_both_copies_get_the_bytes_of_their_difference_at_one_position_over_all_ranks():
    with clients() as made:
        store(made, TEXT, 0, 0)
        earlier = made[0].lookup(PROMPT, acquire=False).matches
        assert sum(len(match.span) for match in earlier) == N and not any(match.exact for match in earlier)
        store(made, PROMPT, len(BEFORE), 1)
        copies, learning = copies_of(made[0])
        copies.add(CopiesJob("r", Variant(), PROMPT, earlier))
        assert numbers(learning) == (N, 0)
        for prompt, start in ((TEXT, 0), (PROMPT, len(BEFORE))):
            found = np.frombuffer(known(made[0], prompt), np.uint8).astype(int)
            assert not found[:start].any()
            assert np.abs(found[start:] - expected()).max() <= 1
        assert made[0].stats().gauges["read_leases"] == 0


def test_a_copy_that_is_gone_costs_the_comparison_alone(caplog):
    with clients() as made:
        store(made, TEXT, 0, 0)
        earlier = made[0].lookup(PROMPT, acquire=False).matches
        made[0].clear()
        copies, _ = copies_of(made[0])
        copies.add(CopiesJob("r", Variant(), PROMPT, earlier))
        copies.add(CopiesJob("r", Variant(), PROMPT, earlier))
        while copies._jobs.qsize():
            time.sleep(0.01)
        store(made, TEXT, 0, 0)
        assert known(made[0], TEXT) == b""
        assert made[0].stats().gauges["read_leases"] == 0


def test_a_hub_that_does_not_answer_is_counted():
    copies, learning = copies_of(None)
    with clients() as made:
        store(made, TEXT, 0, 0)
        earlier = made[0].lookup(PROMPT, acquire=False).matches
    copies.add(CopiesJob("r", Variant(), PROMPT, earlier))
    assert numbers(learning) == (0, N)
