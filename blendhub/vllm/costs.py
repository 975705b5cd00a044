"""How long a prompt takes, with reuse and without, by times that the worker has measured on the loaded model."""

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from blendhub.core.spans import Span, total
from blendhub.vllm.decision import Decision

GROWTH_FROM = 1024
"""Shorter prompts do not show how attention grows: what differs between them is noise."""
LOAD_STEPS = 3
"""The engine's steps in which a load begins, is found copied, and is reported; no token of its request is computed."""
IN_SERVICE = 1.25
"""How much longer reuse takes in service, beside threads that look up and save, than at the start."""


class Cost(msgspec.Struct, frozen=True):
    """The seconds of one kind of work on tokens."""

    token: float
    growth: float = 0.0
    """What a token takes longer for each token before it."""
    measured: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    """The sums over a few tokens, and what these took in truth: a forward takes some time however few they are."""

    def sum(self, spans: Iterable[Span]) -> float:
        """The seconds of these tokens as part of much work."""
        return sum(self.token * len(span) + self.growth * (span.end**2 - span.start**2) / 2 for span in spans)

    def seconds(self, work: float, n_forwards: int = 1) -> float:
        """The seconds of tokens with this sum, in so many equal parts."""
        sums, taken = zip(*self.measured, strict=True)
        part = work / n_forwards
        return n_forwards * (part if part >= sums[-1] else float(np.interp(part, sums, taken)))

    @classmethod
    def fitted(cls, measured: Sequence[tuple[int, float]], share: float = 1.0) -> "Cost":
        """From the seconds that prompts of some lengths took, of whose tokens a share was worked on. The two longest
        show what a token takes and how that grows."""
        (shorter, short_s), (longer, long_s) = measured[-2:]
        short_mean, long_mean = short_s / shorter / share, long_s / longer / share
        half = (long_mean - short_mean) / (longer - shorter) if longer >= GROWTH_FROM else 0.0
        half = min(max(half, 0.0), long_mean / longer)
        cost = cls(long_mean - half * longer, 2 * half)
        return cls(cost.token, cost.growth, tuple((share * cost.sum([Span(0, n)]), taken) for n, taken in measured))


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of all that the KV of a prompt takes, and how much of it one forward does."""

    prefill: Cost
    probe: Cost
    """Finding the tokens to recompute, by the length of the prompt."""
    recompute: Cost
    """Computing chosen tokens again."""
    load: Cost
    engine_tokens: int
    """The most tokens of a forward."""
    token_bytes: float
    """The KV of a token on one rank."""
    step: float = 0.0
    """A step of vLLM in which it computes nothing of the prompt."""

    def seconds(self, claim: Decision, n_tokens: int, ratio: float) -> float:
        """How long a prompt takes that reuses this much and has this share of the moved text recomputed."""
        rest = Span(claim.end, n_tokens)
        computing = self.prefill.seconds(self.prefill.sum([rest]), -(-len(rest) // self.engine_tokens))
        if not claim.matches:
            return computing
        moved, holes = claim.moved, claim.holes
        of_maps = sum(map.shard_bytes for map in claim.maps) / self.token_bytes
        loaded = total(claim.exact) + total(claim.settled) + total(moved) + of_maps
        reusing = LOAD_STEPS * self.step + self.load.seconds(self.load.token * loaded)
        if moved and 0 < ratio < 1:
            reusing += self.probe.seconds(self.probe.sum([Span(0, claim.end)]))
        if recomputed := math.ceil(claim.recomputed_at(ratio)):
            work = self.prefill.sum(holes) + ratio * self.recompute.sum(moved)
            reusing += self.recompute.seconds(work, -(-recomputed // self.engine_tokens))
        return computing + IN_SERVICE * reusing
