"""The LoRA adapters in a worker's memory."""

import logging
from typing import Any

from blendhub.core.errors import AdapterReplaced
from blendhub.system.recurring import RecurringWarnings
from blendhub.vllm.messages import Adapter, LoadedAdapter
from blendhub.vllm.model.fingerprint import adapter_fingerprint

log = logging.getLogger(__name__)


class LoadedAdapters:
    """The weights of each adapter, and the step since which it has them.

    vLLM loads adapters between steps and right before a forward, drops those used longest ago, and reads them again
    from files that may have changed.
    """

    def __init__(self, manager: Any) -> None:
        """``manager``: vLLM's manager of this rank's adapters; None without LoRA."""
        self._manager = manager
        self._models: dict[int, Any] = {}
        """vLLM's own adapter objects. vLLM makes a new object whenever it reads an adapter."""
        self._known: dict[int, LoadedAdapter] = {}
        """The known adapters, also those that vLLM has dropped: it may read the same weights again."""
        self._has_changed = False
        self._warnings = RecurringWarnings(log)

    def look(self, step: int) -> None:
        """Take note of the loaded adapters. Called as a step begins, and once its adapters are loaded."""
        models = self._models if self._manager is None else self._manager.list_adapters()
        if models == self._models:
            return
        for number, model in models.items():
            if model is not self._models.get(number):
                self._fingerprint(number, model, step)
        self._models, self._has_changed = models, True

    def check(self, adapter: Adapter | None, *, is_loaded: bool) -> None:
        """Raise unless this rank has had these weights since they were reported.

        ``is_loaded``: they must be loaded now; who knows what vLLM reads next.
        """
        if adapter is None:
            return
        loaded = self._known.get(adapter.id)
        if loaded is None or loaded.since > adapter.since:
            raise AdapterReplaced(f"LoRA adapter {adapter.id} has other weights than when the request began")
        if is_loaded and adapter.id not in self._models:
            raise AdapterReplaced(f"vLLM has dropped LoRA adapter {adapter.id} from its memory")

    def take_changes(self) -> dict[int, LoadedAdapter] | None:
        """All loaded adapters, if they have changed since the last call."""
        if not self._has_changed:
            return None
        self._has_changed = False
        return {number: self._known[number] for number in self._models if number in self._known}

    def _fingerprint(self, number: int, model: Any, step: int) -> None:
        loaded = self._known.pop(number, None)
        try:
            weights = adapter_fingerprint(model)
        except Exception as error:  # a request needs its adapter, and not what is stored of it
            text = f"the weights of LoRA adapter {number} cannot be read, and its requests reuse and store nothing"
            self._warnings.warn("fingerprint", text, error)
            return
        self._known[number] = loaded if loaded and loaded.weights == weights else LoadedAdapter(weights, step)
