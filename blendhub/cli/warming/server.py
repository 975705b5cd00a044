"""vLLM's server with the OpenAI interface, as its clients see it."""

import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import httpx
import msgspec

from blendhub.core.errors import BlendHubError, InvalidInput
from blendhub.outcome.reasons import Why
from blendhub.system.served_vllm import transfer_config

T = TypeVar("T")
Prompt: TypeAlias = str | list[dict[str, Any]]
"""A text, or the messages of a chat."""

ANSWER_TIMEOUT_S = 600.0
"""A server that is busy lets a prompt wait; one that is gone closes the connection."""
TOO_MANY = (429, 503)
BUSY_PAUSE_S = 1.0


class Server:
    """A server at an address. Its methods may be called from several threads, and raise InvalidInput for a prompt that
    the server refuses, such as a chat if the model has no chat template.
    """

    def __init__(self, url: str, key: str = "", salt: str = "") -> None:
        """``salt``: the ``cache_salt`` of all requests."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._salt = salt
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False)
        model = self._ask("GET", "/v1/models", None, lambda models: models["data"][0])
        self.model = model["id"]
        self.longest: int = model.get("max_model_len") or 2**30
        """The most tokens of a prompt and its answer."""

    def count(self, prompt: Prompt) -> int:
        """The tokens of a prompt."""
        what = {"prompt": prompt, "add_special_tokens": False} if isinstance(prompt, str) else {"messages": prompt}
        return self._ask("POST", "/tokenize", {"model": self.model, **what}, lambda answer: int(answer["count"]))

    def compute(self, prompt: Prompt, *, store: bool = True) -> int:
        """Compute a prompt, behind nothing blended; others may move what is stored. Returns how much was not reused."""
        n_tokens, report = self._computed(prompt, {"mode": "exact", "store": store, "donate": store})
        reused: int = sum(report.get(f"{kind}_tokens", 0) for kind in ("engine", "exact", "settled", "moved"))
        return n_tokens - reused

    def needs_segments(self, prompt: Prompt, *, store: bool = False) -> bool:
        """Whether some of a prompt's text was computed behind other text, and moves only when it is a segment, as in
        models with recurrent layers. ``store``: it becomes one."""
        _, report = self._computed(prompt, {"store": store, "donate": store})
        return Why.NO_MAP.message in report.get("reason", "")

    def _computed(self, prompt: Prompt, settings: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The tokens of a prompt, and BlendHub's report of it."""
        what, path = ("prompt", "completions") if isinstance(prompt, str) else ("messages", "chat/completions")
        body = {"model": self.model, what: prompt, "max_tokens": 1, "temperature": 0}
        body["kv_transfer_params"] = {"blendhub": settings}
        if self._salt:
            body["cache_salt"] = self._salt
        n_tokens, params = self._ask(
            "POST",
            f"/v1/{path}",
            body,
            lambda answer: (int(answer["usage"]["prompt_tokens"]), answer.get("kv_transfer_params") or {}),
        )
        report = params.get("blendhub")
        if not isinstance(report, dict):
            raise BlendHubError(
                f"the server at {self.url} answers without a report of BlendHub: start vLLM with "
                f"--kv-transfer-config '{msgspec.json.encode(transfer_config({})).decode()}'"
            )
        return n_tokens, report

    def _ask(self, method: str, path: str, body: Any, read: Callable[[Any], T]) -> T:
        """What ``read`` finds in the answer."""
        try:
            while (answer := self._http.request(method, self.url + path, json=body)).status_code in TOO_MANY:
                time.sleep(BUSY_PAUSE_S)
        except httpx.UnsupportedProtocol:
            raise InvalidInput(f"--server {self.url!r} should be an address such as http://localhost:8000") from None
        except httpx.TransportError as error:
            raise BlendHubError(
                f"no server answers at {self.url}: {error or type(error).__name__}; start it, and repeat the command, "
                "which computes only what is not stored"
            ) from None
        if answer.status_code == 401:
            raise BlendHubError(f"the server at {self.url} wants a key: set VLLM_API_KEY to it")
        if answer.status_code == 400:
            raise InvalidInput(f"the server refuses it: {answer.text[:300]}")
        try:
            answer.raise_for_status()
            return read(answer.json())
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            raise BlendHubError(
                f"the server at {self.url} does not answer {path} as vLLM does ({error}); give the address of vLLM's "
                f"server: {answer.text[:200]}"
            ) from None
