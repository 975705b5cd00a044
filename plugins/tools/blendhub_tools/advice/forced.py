"""A logits processor with which vLLM says given tokens; the log-probabilities that it returns stay the model's."""

from functools import partial
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from blendhub_tools.advice.judge import LOGPROBS

OPTIONS: dict[str, Any] = {
    "logits_processors": [f"{__name__}:Forced"],
    "max_logprobs": LOGPROBS,
    # With asynchronous scheduling, the answer until now would reach the processor a token late.
    "async_scheduling": False,
}
"""The arguments of an engine whose answers are made to say given tokens."""


class Forced(AdapterLogitsProcessor):
    """The request's extra argument ``forced`` has the tokens."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        forced = (params.extra_args or {}).get("forced")
        return partial(_force, forced) if forced else None


def _force(forced: list[int], said: list[int], logits: Tensor) -> Tensor:
    only = logits.new_full(logits.shape, -float("inf"))
    only[forced[len(said)]] = 0.0
    return only
