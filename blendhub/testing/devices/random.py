"""Random layouts and segments from hypothesis, compared with the reference."""

from contextlib import closing
from typing import Any, cast

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from blendhub.contracts import PageFormat, PageSegment, Segment
from blendhub.testing.devices.base import DeviceTests
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary
from blendhub.testing.sentences import holds

N_SHARDS = 5


def rotations(key_dim: int) -> st.SearchStrategy[Rotary | None]:
    scales = st.sampled_from([1.0, 0.7, 1.4])
    widths = st.integers(1, key_dim // 2).map(lambda half: 2 * half)
    rotaries = widths.flatmap(
        lambda width: st.builds(Rotary, st.just(width), st.booleans(), st.integers(0, key_dim - width), scales)
    )
    return st.none() | rotaries


@st.composite
def setups(draw: st.DrawFn, formats: tuple[PageFormat, ...], dtypes: tuple[str, ...]) -> DeviceSetup:
    key_dim = draw(st.integers(2, 20))
    return DeviceSetup(
        format=draw(st.sampled_from(formats)),
        dtype=draw(st.sampled_from(dtypes)),
        block_size=draw(st.integers(1, 20)),
        chunk_tokens=draw(st.integers(1, 40)),
        kv_heads=draw(st.integers(1, 3)),
        key_dim=key_dim,
        value_dim=draw(st.integers(1, 20)),
        rotations=tuple(draw(st.lists(rotations(key_dim), min_size=1, max_size=2))),
        strided=draw(st.booleans()),
        n_blocks=draw(st.integers(3, 8)),
        n_shards=N_SHARDS,
    )


@st.composite
def tilings(draw: st.DrawFn, harness: DeviceHarness) -> list[Segment]:
    """Segments that do not overlap, of any rows, in any order."""
    segments: list[Segment] = []
    at = 0
    while at < harness.n_tokens and len(segments) < N_SHARDS:
        start = at + draw(st.integers(0, 12))
        row = draw(st.integers(0, harness.layout.chunk_tokens - 1))
        longest = min(harness.layout.chunk_tokens - row, harness.n_tokens - start)
        if longest < 1:
            break
        at = start + draw(st.integers(1, longest))
        source = draw(st.sampled_from([start, start + 1, 500, 0]))
        segments.append(harness.segment(start, at, shard=draw(st.integers(0, N_SHARDS - 1)), row=row, source=source))
    return draw(st.permutations(segments))


@st.composite
def loads(draw: st.DrawFn, harness: DeviceHarness) -> list[Segment | PageSegment]:
    """Segments, some of which come from blocks that the load does not write, each perhaps several times."""
    segments: list[Segment | PageSegment] = [*draw(tilings(harness))]
    size = harness.setup.block_size
    written = {at // size for one in segments for at in range(one.span.start, one.span.end)}
    unwritten = [int(block) for at, block in enumerate(harness.block_ids) if at not in written]
    blocks = st.sampled_from([*harness.donors.tolist(), *unwritten])
    for at, one in enumerate(segments):
        if draw(st.booleans()):
            row = draw(st.integers(0, 2 * size))
            n_blocks = -(-(row + len(one.span)) // size)
            read = np.array(draw(st.lists(blocks, min_size=n_blocks, max_size=n_blocks)), np.int64)
            segments[at] = PageSegment(one.span, read, row, one.source_start)
    return segments


@holds("This rank's shard of it has a section for each group of layers,")
class RandomTests(DeviceTests):
    def test_any_transfers(self) -> None:
        @settings(
            max_examples=self.n_random_transfers,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(data=st.data())
        def transfers(data: Any) -> None:
            setup = data.draw(setups(self.formats, tuple(self.rotatable_dtypes)), label="setup")
            with closing(self.create()) as device:
                harness = DeviceHarness(device, self.torch_type, setup)
                skipped = data.draw(st.integers(0, 30), label="skipped")
                harness.load(data.draw(loads(harness), label="loaded"), skipped)
                harness.overwrite_pages()
                saved = data.draw(tilings(harness), label="saved")
                harness.save([replace(one, shard=harness.shard(number)) for number, one in enumerate(saved)])

        cast(Any, transfers)()
