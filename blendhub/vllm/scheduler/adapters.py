"""The LoRA adapters that vLLM has loaded, as the workers report them."""

import logging
from collections.abc import Mapping
from hashlib import blake2b

from vllm.lora.request import LoRARequest

from blendhub.vllm.messages import Adapter, LoadedAdapter

log = logging.getLogger(__name__)


class Adapters:
    """The adapters as vLLM has loaded them: files may be replaced, and a name on a hub may get another revision.

    For the scheduler's thread, which hears of an adapter after the first step that computes with it.
    """

    def __init__(self, ranks: int) -> None:
        self._loaded: dict[int, Mapping[int, LoadedAdapter]] = {rank: {} for rank in range(ranks)}
        """The loaded adapters, by rank and by the id in vLLM."""
        self._places: dict[int, tuple[str, str]] = {}
        """The name and the path that requests give for an id; vLLM's own cache tells adapters apart by these."""
        self._weights: dict[tuple[str, str], str] = {}
        self._replaced: set[tuple[str, str]] = set()

    def report(self, adapters: Mapping[int, Mapping[int, LoadedAdapter]]) -> None:
        """Take note of all adapters that these ranks have loaded now."""
        self._loaded.update(adapters)
        if adapters:
            for number in self._places:
                self._compare(number)

    def find(self, lora: LoRARequest) -> Adapter | None:
        """The adapter of a request, if all ranks have loaded it."""
        number, place = lora.lora_int_id, (lora.lora_name, lora.lora_path)
        if self._places.get(number) != place:
            self._places[number] = place
            self._compare(number)
        return self._find(number)

    def was_replaced(self, lora: LoRARequest) -> bool:
        """Whether vLLM's own cache may hold KV of other weights under the adapter's name and path."""
        return (lora.lora_name, lora.lora_path) in self._replaced

    def _find(self, number: int) -> Adapter | None:
        ranks = [loaded[number] for loaded in self._loaded.values() if number in loaded]
        if len(ranks) < len(self._loaded):
            return None
        weights = blake2b(" ".join(one.weights for one in ranks).encode(), digest_size=16).hexdigest()
        return Adapter(number, weights, max(one.since for one in ranks))

    def _compare(self, number: int) -> None:
        place, adapter = self._places[number], self._find(number)
        if adapter is None or self._weights.get(place) == adapter.weights:
            return
        name, path = place
        log.info("LoRA adapter %s of %s is loaded; its KV is kept under %s", name, path, adapter.weights)
        if place in self._weights and place not in self._replaced:
            self._replaced.add(place)
            log.warning(
                "LoRA adapter %s of %s has other weights than before. vLLM's own prefix cache does not tell them "
                "apart, so what is computed behind it is not stored; load changed weights from a new path",
                name, path,
            )  # fmt: skip
        self._weights[place] = adapter.weights
