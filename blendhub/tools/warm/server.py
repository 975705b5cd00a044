"""vLLM's server with the OpenAI interface, as its clients see it."""

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from blendhub.core.errors import BlendHubError, InvalidInput, reason_of

T = TypeVar("T")
ANSWER_TIMEOUT_S = 600.0
"""A server that is busy lets a prompt wait; one that is gone closes the connection."""
TOO_MANY = (429, 503)
BUSY_PAUSE_S = 1.0


class ServerGone(BlendHubError):
    """No server answers at the address."""


class ServerBusy(BlendHubError):
    """The server has too many requests now."""


class Completion(msgspec.Struct, frozen=True):
    id: str
    prompt_tokens: int
    report: dict[str, Any]

    @property
    def computed_tokens(self) -> int:
        """The tokens of the prompt that were not reused."""
        reused: Iterator[int] = (
            self.report.get(f"{kind}_tokens", 0) for kind in ("engine", "exact", "settled", "moved")
        )
        return self.prompt_tokens - sum(reused)


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
    id: str
    usage: _Usage
    kv_transfer_params: dict[str, Any] | None = None


class Server:
    """A server at an address. Its methods may be called from several threads, each of which keeps a connection."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(f"--server {url!r} should be an address such as http://localhost:8000")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = parts.path
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._mine = threading.local()
        models = self._ask("GET", "/v1/models", None, _Models).data
        if not models:
            raise BlendHubError(f"the server at {self.url} serves no model")
        self.model = models[0].id
        self.longest = models[0].max_model_len
        """The most tokens of a prompt and its answer; None if the server does not say."""

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text that stands in the middle of a prompt."""
        return self._tokenized({"prompt": text, "add_special_tokens": False})

    def tokens_of_prompt(self, text: str) -> list[int]:
        """The tokens of a text that is a prompt."""
        return self._tokenized({"prompt": text})

    def tokens_of_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a chat; raises InvalidInput if the model has no chat template, or if that refuses it."""
        return self._tokenized({"messages": list(messages)})

    def complete(
        self,
        prompt: Sequence[int],
        asked: Mapping[str, Any],
        salt: str = "",
        wait: Callable[[], object] = lambda: time.sleep(BUSY_PAUSE_S),
    ) -> Completion:
        """Compute a prompt and one token more; ``asked`` is what the request says to BlendHub.

        While the server has too much to do, ``wait`` is called before each further try.
        """
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        body["kv_transfer_params"] = {"blendhub": asked}
        if salt:
            body["cache_salt"] = salt
        answer = None
        while answer is None:
            try:
                answer = self._ask("POST", "/v1/completions", body, _Answer)
            except ServerBusy:
                wait()
        report = (answer.kv_transfer_params or {}).get("blendhub")
        if not isinstance(report, dict):
            raise BlendHubError(
                f"the server at {self.url} answers without a report of BlendHub: start vLLM with "
                '--kv-transfer-config \'{"kv_connector": "BlendHubConnector", "kv_role": "kv_both"}\''
            )
        return Completion(answer.id, answer.usage.prompt_tokens, report)

    def _tokenized(self, body: dict[str, Any]) -> list[int]:
        return self._ask("POST", "/tokenize", {"model": self.model, **body}, _Tokens).tokens

    def _ask(self, method: str, path: str, body: Any, expected: type[T]) -> T:
        try:
            status, said = self._exchange(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(f"no server answers at {self.url}: {reason_of(error)}") from None
        if status in TOO_MANY:
            raise ServerBusy(f"the server at {self.url} has too many requests")
        if status == 401:
            raise BlendHubError(f"the server at {self.url} wants a key: set VLLM_API_KEY to it")
        if status == 400:
            raise InvalidInput(_message(said))
        try:
            if status != 200:
                raise msgspec.DecodeError(f"status {status}")
            return msgspec.json.decode(said, type=expected)
        except msgspec.DecodeError as error:
            raise BlendHubError(
                f"the server at {self.url} does not answer {path} as vLLM does ({error}); give the address of vLLM's "
                f"server: {_message(said)[:200]}"
            ) from None

    def _exchange(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        encoded = None if body is None else msgspec.json.encode(body)
        for is_new in (False, True):
            kept = None if is_new else getattr(self._mine, "connection", None)
            connection = self._mine.connection = kept or self._connection()
            try:
                connection.request(method, self._path + path, encoded, self._headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                del self._mine.connection
                # A server closes connections that were idle; a new one tells whether it is still there.
                if kept is None:
                    raise
        raise AssertionError("a new connection either answers or raises")

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=ANSWER_TIMEOUT_S)


def _message(said: bytes) -> str:
    """What an error of the server says: some versions of vLLM nest it."""
    with contextlib.suppress(msgspec.DecodeError, AttributeError, KeyError, TypeError):
        given = msgspec.json.decode(said)
        return str((given.get("error") or given)["message"])
    return said.decode(errors="replace")
