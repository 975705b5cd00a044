"""The terms of a request: what it may reuse, store and have repaired."""

from typing import Any

import msgspec
from vllm.v1.request import Request

from blendhub.core.layout import Variant
from blendhub.vllm.messages import Adapter
from blendhub.vllm.settings import Mode, RepairMode

MOVING: tuple[Mode, ...] = ("blend", "contiguous")
"""The modes in which text may be reused elsewhere than where it was computed."""


class Terms(msgspec.Struct, frozen=True):
    """The terms of a request, from the engine's settings and its own parameters. Fixed when the request arrives, but
    for an adapter that is known later."""

    variant: Variant
    """The variant whose KV the request reads and stores."""
    mode: Mode
    ratio: float
    """The share of moved text that is recomputed."""
    stores: bool
    donates_from: int = 0
    """The position in the prompt from which on its KV may be moved into other prompts."""
    donates: bool = False
    """Whether others' KV may not move, so that the hub may lack what has an exact copy."""
    explains: bool = False
    audit: bool = False
    """Whether the request asks for an audit."""
    adapter: Adapter | None = None
    """Its LoRA adapter; None without one, or until the workers have reported it."""
    settles: bool = False
    """Whether the request takes KV that earlier requests blended."""
    fills_holes: bool = False
    """Whether holes of the prompt may be computed apart from the engine's own prefill."""
    repair: RepairMode = "off"
    """When approximate KV is computed anew."""
    teaches: bool = False
    """Whether the hub has found the ratio, and learns from what becomes of the request."""
    doubt: float = 0.0
    """The margin below which a token waits until all KV is exact; 0: none does."""
    repairable: bool = False
    """Whether the model can compute chosen tokens of the request."""
    received_from: int | None = None
    """If another connector brings the prompt's KV: the position from which on it may be blended."""

    @property
    def moves(self) -> bool:
        """Whether text may be reused elsewhere than where it was computed."""
        return self.mode in MOVING

    @property
    def settled_ratio(self) -> float | None:
        """The least share that must have been recomputed in settled KV that the request takes; None: it takes none."""
        return self.ratio if self.settles else None


def is_plain(params: Any) -> bool:
    """Whether an answer's tokens are the model's likeliest ones, as nothing but the model decides."""
    return (
        is_greedy(params)
        and not (params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
        and not (params.logit_bias or params.allowed_token_ids or params.bad_words or params.min_tokens)
        and not params.structured_outputs
        and getattr(params, "thinking_token_budget", None) is None  # not every version has it
        and set(params.extra_args or ()) <= {"kv_transfer_params"}
    )


def is_greedy(params: Any) -> bool:
    """Whether nothing in an answer is left to chance."""
    return params is not None and params.temperature == 0


def text_end(request: Request) -> int | None:
    """The end of the text before the first image, sound or video; None without any. Behind it, KV and positions do not
    follow from the token ids."""
    return min((feature.mm_position.offset for feature in request.mm_features or ()), default=None)
