"""Text of prompts made into token ids by the tokenizers that the hub's configuration names."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blendhub.core.errors import Busy, InvalidInput
from blendhub.hub.limits import MOST_WAITING_TEXTS


class Tokenizers:
    """Tokenizers by model, each loaded when it is needed first. One thread works for all, on one text at a time."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        """``folders``: where each model's ``tokenizer.json`` is."""
        self._folders = folders
        self._loaded: dict[str, Any] = {}
        self._one_at_a_time = asyncio.Lock()
        self._n_waiting = 0

    async def encode(self, model: str, text: str) -> list[int]:
        """The token ids, with the special tokens that vLLM adds to a completion's prompt."""
        folder = self._folders.get(model)
        if folder is None:
            raise InvalidInput(
                f"text needs the tokenizer of {model!r}: name the folder of its tokenizer.json in the hub's "
                "configuration, under tokenizers, or send token_ids"
            )
        if self._n_waiting >= MOST_WAITING_TEXTS:
            raise Busy(f"{self._n_waiting} texts wait for a tokenizer; send token_ids, or ask again")
        self._n_waiting += 1
        try:
            async with self._one_at_a_time:
                return await asyncio.to_thread(self._encode, model, folder, text)
        finally:
            self._n_waiting -= 1

    def _encode(self, model: str, folder: str, text: str) -> list[int]:
        if model not in self._loaded:
            self._loaded[model] = _load(Path(folder).expanduser() / "tokenizer.json")
        # Unlike ``encode``, it releases the interpreter's lock, which the event loop needs.
        (encoded,) = self._loaded[model].encode_batch([text])
        ids: list[int] = encoded.ids
        return ids


def _load(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InvalidInput("text needs the package tokenizers: pip install tokenizers; or send token_ids") from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise InvalidInput(f"the tokenizer {file} cannot be read: {error}") from None
