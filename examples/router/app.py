"""The reverse proxy: an application of Starlette before vLLM's servers."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.router.choice import Loads, choose
from examples.router.scores import Backend, Scores

HALF_LIFE_S = 60.0
SLACK_TOKENS = 8192.0
DOWN_S = 5.0
"""How long an engine that could not be reached gets no request."""
TOKENIZE_S = 5.0
MOST_BODY_BYTES = 2**25
OURS = {"host", "content-length", "connection", "keep-alive", "transfer-encoding", "content-encoding", "upgrade", "te"}
"""Headers that belong to one connection."""


class Router:
    """Sends each request to one of the backends."""

    def __init__(self, client: httpx.AsyncClient, backends: list[Backend], scores: Scores) -> None:
        self._client = client
        self._backends = backends
        self._scores = scores
        self._loads = Loads(len(backends), HALF_LIFE_S)
        self._running = [0.0] * len(backends)
        """The tokens that are left to compute of the requests that have no answer yet."""
        self._up_again_at = [0.0] * len(backends)

    async def generate(self, request: Request) -> Response:
        """A completion, by the engine that reuses most of its prompt."""
        try:
            asked = json.loads(body := await _body(request))
            if not isinstance(asked, dict):
                raise ValueError("a request is a JSON object")
        except ValueError as error:
            return _error(400, str(error))
        token_ids = await self._token_ids(asked, request.headers.get("authorization", ""))
        reused = await self._scores.ask(token_ids, str(asked.get("cache_salt") or ""))
        return await self._send_to_best(request, body, len(token_ids), reused)

    async def forward(self, request: Request) -> Response:
        """What concerns no prompt, such as the list of models, by any engine."""
        try:
            body = await _body(request)
        except ValueError as error:
            return _error(413, str(error))
        return await self._send_to_best(request, body, 0, [0.0] * len(self._backends))

    async def _send_to_best(self, request: Request, body: bytes, n_tokens: int, reused: list[float]) -> Response:
        """Send it to the best engine that can be reached."""
        while (number := self._choose(reused, n_tokens)) is not None:
            try:
                return await self._send(request, body, number, max(n_tokens - reused[number], 0.0))
            except httpx.TransportError:
                self._up_again_at[number] = time.monotonic() + DOWN_S
        return _error(503, "no engine can be reached")

    def _choose(self, reused: list[float], n_tokens: int) -> int | None:
        """The engine; None if none is up."""
        now = time.monotonic()
        up = [number for number, at in enumerate(self._up_again_at) if at <= now]
        if not up:
            return None
        loads = [lately + running for lately, running in zip(self._loads.now(now), self._running, strict=True)]
        return up[choose([reused[number] for number in up], [loads[number] for number in up], n_tokens, SLACK_TOKENS)]

    async def _send(self, request: Request, body: bytes, number: int, to_compute: float) -> Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in OURS]
        url = httpx.URL(self._backends[number].engine + request.url.path, query=request.url.query.encode())
        self._running[number] += to_compute
        try:
            sent = self._client.build_request(request.method, url, headers=headers, content=body)
            answer = await self._client.send(sent, stream=True)
        except BaseException:
            self._running[number] -= to_compute
            raise
        self._loads.add(number, to_compute, time.monotonic())
        kept = {name: value for name, value in answer.headers.items() if name not in OURS}
        return StreamingResponse(self._streamed(answer, number, to_compute), answer.status_code, kept)

    async def _streamed(self, answer: httpx.Response, number: int, to_compute: float) -> AsyncIterator[bytes]:
        try:
            async for part in answer.aiter_bytes():
                yield part
        finally:
            self._running[number] -= to_compute
            await answer.aclose()

    async def _token_ids(self, asked: dict[str, Any], authorization: str) -> list[int]:
        """The prompt's token ids, once for all hubs; empty where there are none: then the load alone decides.

        An engine makes them of text, since it knows the model's tokenizer and chat template.
        """
        prompt = asked.get("prompt")
        if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            return prompt
        if (number := self._choose([0.0] * len(self._backends), 0)) is None:
            return []
        told = {key: asked[key] for key in ("model", "prompt", "messages", "tools") if key in asked}
        try:
            answer = await self._client.post(
                f"{self._backends[number].engine}/tokenize",
                json=told,
                headers={"Authorization": authorization} if authorization else {},
                timeout=TOKENIZE_S,
            )
            ids: list[int] = answer.raise_for_status().json()["tokens"]
            return ids
        except (httpx.HTTPError, ValueError, KeyError):
            return []


async def _body(request: Request) -> bytes:
    read = bytearray()
    async for part in request.stream():
        read += part
        if len(read) > MOST_BODY_BYTES:
            raise ValueError(f"a request has at most {MOST_BODY_BYTES:,} bytes")
    return bytes(read)


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "router_error", "code": status}}, status)


def make_app(
    backends: list[Backend],
    *,
    model: str = "",
    token: str = "",
    timeout_s: float = 0.1,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Starlette:
    """``timeout_s``: how long a hub may take for a score. ``transport``: of tests."""
    # Answers take as long as they take; engines that are down show when the connection is made.
    client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=2.0), transport=transport)
    router = Router(client, backends, Scores(client, backends, model=model, token=token, timeout_s=timeout_s))

    @asynccontextmanager
    async def closing(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    routes = [
        *(Route(f"/v1/{path}", router.generate, methods=["POST"]) for path in ("completions", "chat/completions")),
        Route("/{path:path}", router.forward, methods=["GET", "POST"]),
    ]
    return Starlette(routes=routes, lifespan=closing)
