"""Rules by which engines of the state machine find and read what is stored."""

import contextlib

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule

from blendhub.client import wire
from blendhub.contracts import Segment
from blendhub.core.errors import BlendHubError
from blendhub.core.layout import Variant
from blendhub.core.spans import Span
from tests.hub.hub_direct import BASE
from tests.hub.machine_engines import (
    PROMPT,
    PROMPTS,
    SILENCE_S,
    TEXTS,
    VARIANT,
    VARIANTS,
    WHICH,
    Engine,
    HubRules,
    Process,
    Read,
)


class ReadingRules(HubRules):
    @rule(
        which=WHICH,
        prompt=PROMPT,
        variant=VARIANT,
        wait=st.sampled_from([0.0, 0.5]),
        skip=st.integers(0, 220),
        settled=st.sampled_from([None, 0.0, 0.3]),
    )
    def look_up(self, which: int, prompt: int, variant: Variant, wait: float, skip: int, settled: float | None) -> None:
        self.look_up_by(self.an_engine(which), PROMPTS[prompt], variant, wait, skip, settled)

    def look_up_by(
        self,
        engine: Engine,
        prompt: np.ndarray,
        variant: Variant = BASE,
        wait: float = 0.0,
        skip: int = 0,
        settled: float | None = None,
    ) -> None:
        """Each worker that knows the scheduler's hub copies under the lookup's lease."""
        scheduler = engine.scheduler.client
        with contextlib.suppress(BlendHubError):
            found = scheduler.lookup(prompt, variant, wait_s=wait, skip_prefix=skip, settled=settled).result()
            check_order([match.span for match in found.matches], skip)
            assert not any(match.settled and (settled is None or match.exact) for match in found.matches)
            assert all(match.moved or match.source_start == match.span.start for match in found.matches)
            assert (found.lease is None) == (not found.matches)
            assert sum(len(piece.span) for piece in found.pieces) == sum(len(match.span) for match in found.matches)
            workers = [worker for worker in engine.workers if worker.client.epoch == scheduler.epoch]
            copies = [copied(worker, found) for worker in workers]
            if found.lease is not None:
                scheduler.release(found.lease).result()
            for worker, shards in zip(workers, copies, strict=True):
                check(worker, shards, prompt, variant)

    def look_up_all(self) -> None:
        for prompt in TEXTS:
            for engine in self.engines:
                for variant in VARIANTS:
                    self.look_up_by(engine, prompt, variant)

    @rule(which=WHICH, prompt=PROMPT, variant=VARIANT, seconds=st.sampled_from([0.0, 1.0]), skip=st.integers(0, 220))
    def look_up_and_read_later(self, which: int, prompt: int, variant: Variant, seconds: float, skip: int) -> None:
        engine = self.an_engine(which)
        with contextlib.suppress(BlendHubError):
            found = engine.scheduler.client.lookup(PROMPTS[prompt], variant, skip_prefix=skip).result()
            check_order([piece.span for piece in found.pieces], skip)
            if found.lease is not None:
                engine.reads.append(Read(found, PROMPTS[prompt], variant))
            self.hub.pass_time(seconds)

    @rule(which=WHICH)
    def read_and_release(self, which: int) -> None:
        engine = self.an_engine(which)
        if engine.reads:
            found, prompt, variant = engine.reads.pop()
            worker = engine.workers[0]
            assert found.lease is not None
            with contextlib.suppress(BlendHubError):  # what was read must not be used then, so it may be anything
                shards = copied(worker, found)
                worker.client.release(found.lease).result()
                check(worker, shards, prompt, variant)

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, 11.0, 11.0, SILENCE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.hub.pass_time(seconds)


def check_order(spans: list[Span], skip: int) -> None:
    at = skip
    for span in spans:
        assert span.start >= at and len(span)
        at = span.end


def copied(worker: Process, found: wire.Found) -> list[tuple[Segment, np.ndarray]]:
    return [(piece, worker.client.shard(piece.shard).copy()) for piece in found.pieces]


def check(worker: Process, shards: list[tuple[Segment, np.ndarray]], prompt: np.ndarray, variant: Variant) -> None:
    """Every piece holds the bytes that were written for these tokens at the positions it names."""
    for piece, shard in shards:
        rows = shard.view(np.uint32)[piece.row : piece.row + len(piece.span)]
        expected = prompt[piece.span.start : piece.span.end] ^ worker.mark(variant)
        assert np.array_equal(rows, expected), "a piece holds other KV than was stored"
