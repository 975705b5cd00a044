"""Asks a server as an agent does, through the OpenAI interface."""

import json
import time
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.agents.scripts import Message
from blendhub.core.spans import Span, join_spans

LOGPROBS = 100
"""How many tokens have a log-probability in an answer, the likeliest ones; all others count as one."""


class Reply(NamedTuple):
    seconds: float
    """Until the answer was whole."""
    computed_tokens: int
    """The tokens of the prompt that were computed."""
    tokens: list[int]
    logprobs: list[dict[int, float]]
    """For each token of the answer, those of the likeliest ones."""


class Client:
    def __init__(self, port: int, model: str) -> None:
        self._address = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._model = model

    def ask(self, messages: Sequence[Message], salt: str, tokens: int = 1) -> Reply:
        """``salt``: requests with different ones share nothing."""
        body = {"model": self._model, "messages": list(messages), "cache_salt": salt, "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": LOGPROBS}
        body |= {"return_tokens_as_token_ids": True, "kv_transfer_params": {"blendhub": {"explain": True}}}
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._address, data, {"Content-Type": "application/json"})
        begun = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            said = json.load(answer)
        seconds = time.perf_counter() - begun
        usage, report = said["usage"], (said.get("kv_transfer_params") or {}).get("blendhub", {})
        content = said["choices"][0]["logprobs"]["content"]
        logprobs = [{_id(one): one["logprob"] for one in token["top_logprobs"]} for token in content]
        computed = computed_tokens(usage["prompt_tokens"], usage.get("prompt_tokens_details") or {}, report)
        return Reply(seconds, computed, list(map(_id, content)), logprobs)


def computed_tokens(prompt: int, details: dict[str, int], report: dict[str, Any]) -> int:
    if "engine_tokens" not in report:
        return prompt - (details.get("cached_tokens") or 0)
    spans = {name: [Span(*one) for one in those] for name, those in (report.get("spans") or {}).items()}
    # Settled KV may be in vLLM's cache, too.
    kept = [Span(0, report["engine_tokens"])] if report["engine_tokens"] else []
    kept += [span for name in ("exact", "settled", "moved") for span in spans.get(name, [])]
    return prompt - sum(map(len, join_spans(kept))) + sum(map(len, spans.get("recomputed", [])))


def _id(token: dict[str, Any]) -> int:
    return int(token["token"].removeprefix("token_id:"))
