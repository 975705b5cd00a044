"""Mistakes that loads with holes invite: positions that count from the cached prefix, and rare shapes of hit lists.

Keys are made without rotation first. So what a load must leave in the pages does not follow from another device, but
from the positions of the prompt: the key, rotated by its position.
"""

import numpy as np
import pytest
import torch
from npu_stand_ins import A2, A5, UNKNOWN, device_on_npu_runtime

from blendhub import Span
from blendhub.contracts import PagedLayer, Rotation, Segment
from blendhub.core.layout import KVLayout

HEADS, WIDTH, BLOCK, CHUNK, POSITIONS, N_BLOCKS = 2, 32, 128, 64, 4096, 9
LAYOUT = KVLayout(layers=2, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="bfloat16", chunk_tokens=CHUNK)
BLOCK_IDS = np.array([4, 0, 7, 2, 5])
UNTOUCHED = -7.0


def angles(positions):
    return torch.outer(positions.double(), 10_000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)))


def rotated(keys, positions):
    """Keys ``[tokens, heads, width]`` at these positions, in float64."""
    cos, sin = angles(positions).cos()[:, None], angles(positions).sin()[:, None]
    one, other = keys.double().chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Engine:
    """Pages of a model, and an arena of chunks that hold ``keys`` and ``values`` as stored from ``source`` on."""

    def __init__(self, soc_version):
        table = angles(torch.arange(POSITIONS))
        rotation = Rotation(torch.cat([table.cos(), table.sin()], 1).float(), True)
        shape = N_BLOCKS, BLOCK, HEADS, WIDTH
        self.pages = [[torch.full(shape, UNTOUCHED).bfloat16() for _ in range(2)] for _ in range(LAYOUT.layers)]
        self.device = device_on_npu_runtime(soc_version)
        layers = [PagedLayer(f"layer {n}", "split", tuple(pair), rotation) for n, pair in enumerate(self.pages)]
        self.device.attach(layers, BLOCK, LAYOUT)
        random = torch.Generator().manual_seed(1)
        self.keys, self.values = (torch.randn(600, HEADS, WIDTH, generator=random) for _ in range(2))

    def store(self, source, n_chunks):
        """KV of the first tokens, as an engine stored it at positions from ``source`` on."""
        count = n_chunks * CHUNK
        keys = rotated(self.keys[:count], torch.arange(source, source + count)).bfloat16()
        both = torch.stack([keys, self.values[:count].bfloat16()]).unflatten(1, (n_chunks, CHUNK))
        arena = both.transpose(0, 1)[:, None].expand(-1, LAYOUT.layers, -1, -1, -1, -1).contiguous()
        self.device.pin(arena.view(torch.uint8).flatten().numpy())

    def token(self, layer, position):
        """The key and the value in the pages."""
        block = BLOCK_IDS[position // BLOCK]
        return tuple(plane[block, position % BLOCK].double() for plane in self.pages[layer])

    def check(self, loaded):
        """``loaded`` maps positions of the prompt to stored tokens; all other slots must be untouched."""
        count = 0
        for layer in range(LAYOUT.layers):
            for position, token in loaded.items():
                key, value = self.token(layer, position)
                wanted = rotated(self.keys[[token]], torch.tensor([position]))[0]
                assert torch.allclose(key, wanted, atol=0.06), f"the key at position {position} is that of another one"
                assert torch.equal(value, self.values[token].bfloat16().double())
            for plane in self.pages[layer]:
                count += int((plane != UNTOUCHED).any(-1).any(-1).sum())
        assert count == len(loaded) * 2 * LAYOUT.layers, "a token beyond the segments was written"


@pytest.fixture(params=[A2, A5, UNKNOWN], ids=["A2", "A5", "torch alone"])
def engine(request):
    made = Engine(request.param)
    yield made
    made.device.close()


def segment(start, end, *, chunk=0, row=0, source):
    return Segment(Span(start, end), chunk * LAYOUT.shard_bytes, row, source)


def test_keys_are_rotated_by_positions_of_the_prompt_not_of_what_follows_the_cached_prefix(engine):
    """The engine has the first 130 tokens itself. Positions that begin after them would put all keys 130 too early."""
    engine.store(source=1000, n_chunks=2)
    segments = [segment(140, 204, source=1000), segment(204, 268, chunk=1, source=1064)]
    engine.device.load(segments, BLOCK_IDS, 130).wait()
    engine.check({140 + k: k for k in range(128)})


def test_a_cached_prefix_that_ends_within_a_segment_changes_nothing_of_its_rest(engine):
    engine.store(source=1000, n_chunks=2)
    segments = [segment(100, 164, source=1000), segment(164, 228, chunk=1, source=1064)]
    engine.device.load(segments, BLOCK_IDS, 131).wait()
    engine.check({100 + k: k for k in range(31, 128)})


def test_a_first_segment_that_is_missing_does_not_keep_the_others_away(engine):
    engine.store(source=0, n_chunks=2)
    engine.device.load([segment(300, 364, chunk=1, source=64)], BLOCK_IDS).wait()
    engine.check({300 + k: 64 + k for k in range(64)})


def test_one_segment_is_enough(engine):
    engine.store(source=40, n_chunks=1)
    engine.device.load([segment(40, 104, source=40)], BLOCK_IDS).wait()
    engine.check({40 + k: k for k in range(64)})


@pytest.mark.parametrize("skipped", [0, 500])
def test_an_empty_hit_list_loads_nothing_and_ends(engine, skipped):
    engine.store(source=0, n_chunks=1)
    for segments in ([], [segment(30, 30, source=0)]):
        transfer = engine.device.load(segments, BLOCK_IDS, skipped)
        transfer.wait()
        assert transfer.done()
    engine.check({})


def test_holes_of_any_size_are_left_as_they_are(engine):
    """A separator is a hole of one token. The device leaves it unwritten; the engine computes it."""
    engine.store(source=500, n_chunks=2)
    spans = [(3, 20, 0), (21, 50, 20), (200, 201, 64), (255, 257, 70), (500, 533, 80)]
    segments = [
        segment(start, end, chunk=token // CHUNK, row=token % CHUNK, source=500 + token) for start, end, token in spans
    ]
    engine.device.load(segments, BLOCK_IDS).wait()
    engine.check({start + k: token + k for start, end, token in spans for k in range(end - start)})


def test_moved_and_exact_segments_of_one_load_keep_their_bits(engine):
    engine.store(source=64, n_chunks=2)
    engine.device.load([segment(64, 128, source=64), segment(400, 464, chunk=1, source=128)], BLOCK_IDS).wait()
    exact = rotated(engine.keys[:64], torch.arange(64, 128)).bfloat16().double()
    assert all(torch.equal(engine.token(layer, 64 + k)[0], exact[k]) for layer in range(2) for k in range(64))
    engine.check({**{64 + k: k for k in range(64)}, **{400 + k: 64 + k for k in range(64)}})
