"""Which runs a request has stored: those whose KV it computed or blended. Runs that it read belong to others."""

from typing import TYPE_CHECKING

from blendhub.outcome.request_names import names_of

if TYPE_CHECKING:
    from blendhub.hub.index.namespace_index import Run


class RequestRuns:
    """The runs by every name that clients may know their request by: those with chunks, and those that grow."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[Run, None]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, request: str) -> list["Run"]:
        return list(self._by_name.get(request, ()))

    def add(self, run: "Run") -> None:
        for name in _names(run):
            self._by_name.setdefault(name, {})[run] = None

    def remove(self, run: "Run") -> None:
        for name in _names(run):
            runs = self._by_name[name]
            del runs[run]
            if not runs:
                del self._by_name[name]


def _names(run: "Run") -> set[str]:
    return names_of(run.request) if run.request else set()
