"""Asks every hub how much its engine would reuse of a prompt; a hub that does not answer in time counts as empty."""

import asyncio
from typing import Any, NamedTuple

import httpx

FETCHED = 0.5
"""The worth of a token that the engine must fetch from a store, relative to one in the hub's memory."""


class Backend(NamedTuple):
    """An engine's server, and its hub's port of ``/metrics``."""

    engine: str
    hub: str


class Scores:
    """The hubs of all backends."""

    def __init__(
        self, client: httpx.AsyncClient, backends: list[Backend], *, model: str, token: str, timeout_s: float
    ) -> None:
        """``model``: its name in the hubs; empty: their only one. ``token``: their ``score_token``; empty: none."""
        self._client = client
        self._backends = backends
        self._model = model
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s

    async def ask(self, token_ids: list[int], cache_salt: str) -> list[float]:
        """The worth of what each engine would reuse, in tokens."""
        question = {"token_ids": token_ids, "model": self._model, "cache_salt": cache_salt}
        return await asyncio.gather(*(self._of(backend.hub, question) for backend in self._backends))

    async def _of(self, hub: str, question: dict[str, Any]) -> float:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.post(f"{hub}/score", json=question, headers=self._headers)
            score = answer.raise_for_status().json()
            return float(sum(score["reused"].values()) - score["in_store"] * (1 - FETCHED))
        except (TimeoutError, httpx.HTTPError, ValueError, KeyError):
            return 0.0
