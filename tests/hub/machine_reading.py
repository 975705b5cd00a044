"""Rules by which engines of the state machine find and read what is stored."""

import contextlib

import numpy as np
from hub_direct import BASE
from hypothesis import strategies as st
from hypothesis.stateful import rule
from machine_engines import (
    LEASE_S,
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

from blendhub.client import wire
from blendhub.contracts import Segment
from blendhub.core.errors import BlendHubError
from blendhub.core.layout import Variant
from blendhub.core.spans import Span


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
        """What the lookup leases, each worker acquires, while the line to both is good."""
        scheduler = engine.scheduler.client
        with contextlib.suppress(BlendHubError):
            found = scheduler.lookup(prompt, variant, wait_s=wait, skip_prefix=skip, settled=settled)
            check_order([match.span for match in found.matches], skip)
            assert not any(match.settled and (settled is None or match.exact) for match in found.matches)
            assert all(match.moved or match.source_start == match.span.start for match in found.matches)
            assert (found.lease is None) == (not found.matches)
            for worker in engine.workers:
                with contextlib.suppress(BlendHubError):
                    acquired = worker.client.acquire(found.matches, variant)
                    spans = [piece.span for piece in acquired.pieces]
                    assert sum(map(len, spans)) == sum(len(match.span) for match in found.matches)
                    with worker.client.reading(acquired) as pieces:
                        copies = [(piece, copied(worker, piece)) for piece in pieces]
                    check(worker, copies, prompt, variant)
            if found.lease is not None:
                scheduler.release(found.lease)

    def look_up_all(self) -> None:
        for prompt in TEXTS:
            for engine in self.engines:
                for variant in VARIANTS:
                    self.look_up_by(engine, prompt, variant)

    @rule(which=WHICH, prompt=PROMPT, variant=VARIANT, seconds=st.sampled_from([0.0, 1.0]), skip=st.integers(0, 220))
    def look_up_and_acquire_later(self, which: int, prompt: int, variant: Variant, seconds: float, skip: int) -> None:
        engine = self.an_engine(which)
        with contextlib.suppress(BlendHubError):
            found = engine.scheduler.client.lookup(PROMPTS[prompt], variant, acquire=False)
            assert found.lease is None
            self.pass_time(seconds)
            acquired = engine.workers[0].client.acquire(found.matches, variant, skip_prefix=skip)
            check_order([piece.span for piece in acquired.pieces], skip)
            if acquired.lease is not None:
                engine.reads.append(Read(acquired, PROMPTS[prompt], variant))

    @rule(which=WHICH, prompt=PROMPT, variant=VARIANT, another=VARIANT)
    def acquire_in_another_namespace(self, which: int, prompt: int, variant: Variant, another: Variant) -> None:
        client = self.an_engine(which).scheduler.client
        with contextlib.suppress(BlendHubError):
            found = client.lookup(PROMPTS[prompt], variant, acquire=False)
            if another != variant:
                assert client.acquire(found.matches, another) == wire.Found()

    @rule(which=WHICH)
    def read_and_release(self, which: int) -> None:
        engine = self.an_engine(which)
        if engine.reads:
            acquired, prompt, variant = engine.reads.pop()
            worker = engine.workers[0]
            assert acquired.lease is not None
            with contextlib.suppress(BlendHubError):  # what was read must not be used then, so it may be anything
                copies = [(piece, copied(worker, piece)) for piece in acquired.pieces]
                worker.client.release(acquired.lease)
                check(worker, copies, prompt, variant)

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, LEASE_S + 1, LEASE_S + 1, SILENCE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)


def check_order(spans: list[Span], skip: int) -> None:
    at = skip
    for span in spans:
        assert span.start >= at and len(span)
        at = span.end


def copied(worker: Process, piece: Segment) -> np.ndarray:
    return worker.client.shard(piece.shard).copy()


def check(worker: Process, copies: list[tuple[Segment, np.ndarray]], prompt: np.ndarray, variant: Variant) -> None:
    """Every piece holds the bytes that were written for these tokens at the positions it names."""
    for piece, shard in copies:
        rows = shard.view(np.uint32)[piece.row : piece.row + len(piece.span)]
        expected = prompt[piece.span.start : piece.span.end] ^ worker.mark(variant)
        assert np.array_equal(rows, expected), "a piece holds other KV than was stored"
