"""Who may ask ``POST /score``, and the answer over HTTP."""

import hmac
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import msgspec

from blendhub.core.errors import Busy, InvalidInput
from blendhub.hub.counters import Counters
from blendhub.hub.http.routes import JSON, is_address
from blendhub.hub.http.score import Scorer
from blendhub.hub.http.server import TEXT, Page


class ScoreRoute:
    """Scores tell what text is stored, so that only the hub's user and those with its token may ask."""

    def __init__(self, scorer: Scorer, counters: Counters, token: str) -> None:
        """``token``: for ``Authorization: Bearer``; empty: only the hub's user on this machine may ask."""
        self._scorer = scorer
        self._counters = counters
        self._token = f"Bearer {token}".encode() if token else b""

    def refusal(self, target: str, headers: Mapping[str, str], is_own: Callable[[], bool]) -> Page | None:
        """Why a request is not answered; None: its body may be read. ``is_own``: it comes from the hub's own user."""
        if urlsplit(target).path != "/score":
            return Page("404 Not Found", TEXT, b"POST /score is the only one\n")
        given = headers.get("authorization", "").encode("latin-1")
        if self._token and hmac.compare_digest(given, self._token):
            return None
        if is_address(headers.get("host", "")) and is_own():
            return None
        return Page(
            "403 Forbidden", TEXT, b"only the hub's own user may ask here, or who sends its score_token as Bearer\n"
        )

    async def answer(self, body: bytes) -> Page:
        try:
            return Page("200 OK", JSON, msgspec.json.encode(await self._scorer.score(body)))
        except Busy as error:
            self._count(error)
            return Page("429 Too Many Requests", TEXT, f"{error}\n".encode())
        except (InvalidInput, msgspec.MsgspecError) as error:
            self._count(error)
            return Page("400 Bad Request", TEXT, f"{error}\n".encode())

    def _count(self, error: Exception) -> None:
        kind = type(error) if isinstance(error, Busy) else InvalidInput
        self._counters.totals[f"refused_{kind.__name__}"] += 1
