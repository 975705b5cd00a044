"""vLLM's server with the OpenAI interface, as its clients see it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from blendhub.core.errors import BlendHubError, InvalidInput
from blendhub.system.served_vllm import transfer_config

T = TypeVar("T")
ANSWER_TIMEOUT_S = 600.0
"""A server that is busy lets a prompt wait; one that is gone closes the connection."""
TOO_MANY = (429, 503)
BUSY_PAUSE_S = 1.0


class ServerGone(BlendHubError):
    """No server answers at the address."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage
    kv_transfer_params: dict[str, Any] | None = None


class Server:
    """A server at an address. Its methods may be called from several threads."""

    def __init__(self, url: str, key: str = "", salt: str = "") -> None:
        """``salt``: the ``cache_salt`` of all requests."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._salt = salt
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False)
        model = self._ask("GET", "/v1/models", None, _Models).data[0]
        self.model = model.id
        self.longest = model.max_model_len
        """The most tokens of a prompt and its answer; None if the server does not say."""

    def tokens(self, text: str, *, begins: bool = False) -> list[int]:
        """The tokens of a text in a prompt; ``begins``: it is the beginning, where special tokens may stand."""
        return self._tokenized({"prompt": text, "add_special_tokens": begins})

    def tokens_of_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a chat; raises InvalidInput if the model has no chat template, or if that refuses it."""
        return self._tokenized({"messages": list(messages)})

    def compute(self, prompt: Sequence[int], *, store: bool = True) -> int:
        """Compute a prompt, behind nothing blended; returns how many of its tokens were not reused."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        body["kv_transfer_params"] = {"blendhub": {"mode": "exact", "store": store}}
        if self._salt:
            body["cache_salt"] = self._salt
        answer = self._ask("POST", "/v1/completions", body, _Answer)
        report = (answer.kv_transfer_params or {}).get("blendhub")
        if not isinstance(report, dict):
            raise BlendHubError(
                f"the server at {self.url} answers without a report of BlendHub: start vLLM with "
                f"--kv-transfer-config '{msgspec.json.encode(transfer_config({})).decode()}'"
            )
        reused: int = sum(report.get(f"{kind}_tokens", 0) for kind in ("engine", "exact", "settled", "moved"))
        return answer.usage.prompt_tokens - reused

    def _tokenized(self, body: dict[str, Any]) -> list[int]:
        return self._ask("POST", "/tokenize", {"model": self.model, **body}, _Tokens).tokens

    def _ask(self, method: str, path: str, body: Any, expected: type[T]) -> T:
        try:
            while (answer := self._http.request(method, self.url + path, json=body)).status_code in TOO_MANY:
                time.sleep(BUSY_PAUSE_S)
        except httpx.UnsupportedProtocol:
            raise InvalidInput(f"--server {self.url!r} should be an address such as http://localhost:8000") from None
        except httpx.TransportError as error:
            raise ServerGone(f"no server answers at {self.url}: {error or type(error).__name__}") from None
        if answer.status_code == 401:
            raise BlendHubError(f"the server at {self.url} wants a key: set VLLM_API_KEY to it")
        if answer.status_code == 400:
            raise InvalidInput(f"the server refuses it: {answer.text[:300]}")
        try:
            answer.raise_for_status()
            return msgspec.json.decode(answer.content, type=expected)
        except (httpx.HTTPStatusError, msgspec.DecodeError) as error:
            raise BlendHubError(
                f"the server at {self.url} does not answer {path} as vLLM does ({error}); give the address of vLLM's "
                f"server: {answer.text[:200]}"
            ) from None
