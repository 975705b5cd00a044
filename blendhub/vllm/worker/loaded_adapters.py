"""The LoRA adapters in a worker's memory."""

from typing import Any

from blendhub.errors import AdapterReplaced
from blendhub.vllm.messages import Adapter, LoadedAdapter
from blendhub.vllm.worker.model.fingerprint import adapter_fingerprint


class LoadedAdapters:
    """Which weights each adapter has, and since which step.

    vLLM loads adapters between steps and right before a forward, drops those used longest ago, and reads them again
    from files that may have changed.
    """

    def __init__(self, manager: Any) -> None:
        """``manager``: vLLM's, which keeps the adapters of this rank; None without LoRA."""
        self._manager = manager
        self._models: dict[int, Any] = {}
        """vLLM's own objects. It makes another one whenever it reads an adapter."""
        self._known: dict[int, LoadedAdapter] = {}
        """Those that vLLM has dropped, too: it may read the same weights again."""
        self._has_changed = False

    def look(self, step: int) -> None:
        """Take note of what is loaded. Called as a step begins, and before its forward."""
        models = self._models if self._manager is None else self._manager.list_adapters()
        if models == self._models:
            return
        for number, model in models.items():
            if model is self._models.get(number):
                continue
            weights, known = adapter_fingerprint(model), self._known.get(number)
            if known is None or known.weights != weights:
                self._known[number] = LoadedAdapter(weights, step)
        self._models, self._has_changed = models, True

    def check(self, adapter: Adapter | None, *, is_loaded: bool) -> None:
        """Raise unless this rank has had these weights since they were reported.

        ``is_loaded``: they must be loaded now; who knows what vLLM reads next.
        """
        if adapter is None:
            return
        known = self._known.get(adapter.id)
        if known is None or known.since > adapter.since:
            raise AdapterReplaced(f"LoRA adapter {adapter.id} has other weights than when the request began")
        if is_loaded and adapter.id not in self._models:
            raise AdapterReplaced(f"vLLM has dropped LoRA adapter {adapter.id} from its memory")

    def take_changes(self) -> dict[int, LoadedAdapter] | None:
        """All that is loaded, if that has changed since the last call."""
        if not self._has_changed:
            return None
        self._has_changed = False
        return {number: self._known[number] for number in self._models}
