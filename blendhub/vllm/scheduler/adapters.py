"""The LoRA adapters that vLLM has loaded, as the workers report them."""

import logging
from collections.abc import Mapping
from hashlib import blake2b
from typing import TypeVar

from vllm.lora.request import LoRARequest

from blendhub.vllm.messages import Adapter, LoadedAdapter

log = logging.getLogger(__name__)
K = TypeVar("K")
V = TypeVar("V")
MOST_NAMED = 4096
"""The most names that are remembered; clients choose them where adapters are loaded at run time."""


class Adapters:
    """The adapters as vLLM has loaded them: files may be replaced, and a name on a hub may get another revision.

    For the scheduler's thread, which hears of an adapter after the first step that computes with it.
    """

    def __init__(self, ranks: int) -> None:
        self._loaded: dict[int, Mapping[int, LoadedAdapter]] = {rank: {} for rank in range(ranks)}
        """The loaded adapters, by rank and by the id in vLLM."""
        self._names: dict[int, str] = {}
        """The names by id, in the order of the last requests. Some versions of vLLM distinguish adapters in the prefix
        cache by name only."""
        self._weights: dict[str, str] = {}
        """The last weights of each name, in the order in which they were loaded."""
        self._replaced: dict[str, None] = {}
        """The names that got other weights, in that order. Of names that were loaded too long ago nothing is known."""

    def report(self, adapters: Mapping[int, Mapping[int, LoadedAdapter]]) -> None:
        """Take note of all adapters that these ranks have loaded now."""
        self._loaded.update(adapters)
        for number in {number for loaded in adapters.values() for number in loaded}:
            self._compare(number)

    def find(self, lora: LoRARequest) -> Adapter | None:
        """The adapter of a request, if all ranks have loaded it."""
        number, name = lora.lora_int_id, lora.lora_name
        known = self._names.get(number)
        _keep(self._names, number, name)
        # What vLLM reads for the request, if in place, is in the next report.
        if known != name and not lora.load_inplace:
            self._compare(number)
        return self._find(number)

    def was_replaced(self, lora: LoRARequest) -> bool:
        """Whether vLLM's own cache may hold KV of other weights under the adapter's name."""
        return lora.lora_name in self._replaced

    def _find(self, number: int) -> Adapter | None:
        ranks = [loaded[number] for loaded in self._loaded.values() if number in loaded]
        if len(ranks) < len(self._loaded):
            return None
        weights = blake2b(" ".join(one.weights for one in ranks).encode(), digest_size=16).hexdigest()
        return Adapter(number, weights, max(one.since for one in ranks))

    def _compare(self, number: int) -> None:
        name, adapter = self._names.get(number), self._find(number)
        if name is None or adapter is None or self._weights.get(name) == adapter.weights:
            return
        log.info("LoRA adapter %s is loaded; its KV is kept under %s", name, adapter.weights)
        if name in self._weights and name not in self._replaced:
            _keep(self._replaced, name, None)
            log.warning(
                "LoRA adapter %s has other weights than before. vLLM's own prefix cache may not tell them apart, so "
                "what is computed behind it is not stored; load changed weights under a new name",
                name,
            )
        _keep(self._weights, name, adapter.weights)


def _keep(known: dict[K, V], key: K, value: V) -> None:
    """Put this last, and forget what came first if there is too much."""
    known.pop(key, None)
    known[key] = value
    if len(known) > MOST_NAMED:
        del known[next(iter(known))]
