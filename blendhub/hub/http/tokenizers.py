"""Tokenizers of the engines' models: loaded when they are asked for, without holding up the hub."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from blendhub.hub.limits import MOST_TOKENIZERS

PATIENCE_S = 0.5
"""How long an answer waits for a tokenizer: a fraction of what a request may take. The page asks again."""


class Tokenizer(Protocol):
    def decode(self, token_ids: Sequence[int], **how: bool) -> str: ...


Loaded: TypeAlias = Tokenizer | str
"""A tokenizer, or a sentence that says why there is none."""


class Tokenizers:
    """The tokenizers of the engines' models. Runs on the hub's event loop."""

    def __init__(self) -> None:
        self._of_models: dict[str, asyncio.Future[Loaded]] = {}
        """The tokenizers by model; the one that was used longest ago comes first."""

    async def get(self, model: str) -> Loaded | None:
        """A model's tokenizer, or why there is none; None while it is being loaded."""
        loading = self._of_models.pop(model, None) or _load_aside(model)
        self._of_models[model] = loading
        if len(self._of_models) > MOST_TOKENIZERS:
            del self._of_models[next(iter(self._of_models))]
        await asyncio.wait((loading,), timeout=PATIENCE_S)
        return loading.result() if loading.done() else None


def _load_aside(model: str) -> "asyncio.Future[Loaded]":
    """Load a tokenizer in a thread that closing the hub does not wait for: loading may take long."""
    loop = asyncio.get_running_loop()
    loading: asyncio.Future[Loaded] = loop.create_future()

    def end(loaded: Loaded) -> None:
        if not loading.done():
            loading.set_result(loaded)

    def work() -> None:
        loaded = load(model)
        with contextlib.suppress(RuntimeError):  # the hub has stopped meanwhile
            loop.call_soon_threadsafe(end, loaded)

    threading.Thread(target=work, name="blendhub-tokenizer", daemon=True).start()
    return loading


def load(model: str) -> Loaded:
    try:
        # Imported only here: it is large, and most hubs show no text.
        from transformers import AutoTokenizer
    except ImportError:
        return "token ids are shown, because transformers is not installed: pip install transformers"
    found: Any
    try:
        # Only from files: a client chose the name.
        found = AutoTokenizer.from_pretrained(_folder(model), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a model's files are anything
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"token ids are shown, because the tokenizer of the model {model!r} cannot be loaded from this machine's "
            f"files; a hub asks no other machine: {first}"
        )
    tokenizer: Tokenizer = found
    return tokenizer


def _folder(model: str) -> str:
    """The folder with a model's files. By a name, transformers would ask the hub of models whose model it is."""
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download

    return snapshot_download(model, local_files_only=True)
