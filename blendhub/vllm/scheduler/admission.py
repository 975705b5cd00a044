"""Admission: which requests read and store KV, in which namespace, in which mode, and with which LoRA adapter."""

import logging
from collections.abc import Mapping
from hashlib import blake2b

from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from blendhub.client.wire import FIRST_RATIO
from blendhub.core.bounded import put_last
from blendhub.core.errors import InvalidInput, OptionError
from blendhub.core.layout import Namespace, Variant
from blendhub.core.spans import NOWHERE
from blendhub.outcome.reasons import Why
from blendhub.vllm.decision import Refusal
from blendhub.vllm.messages import Adapter, LoadedAdapter
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.scheduler.request.terms import MOVING, Terms, is_greedy, text_end
from blendhub.vllm.settings import (
    KEY,
    RequestSettings,
    Settings,
    foreign_keys,
    has_remote_prefill,
    is_split,
    read_request,
)

log = logging.getLogger(__name__)
MAX_NAMED = 4096
"""The most names that are remembered; clients choose them where adapters are loaded at run time."""

MAX_NOTED = 32
NOT_KNOWN = "not known"
"""A placeholder for unknown weights of an adapter; no adapter's weights have this name."""


class Admission:
    """Decides the terms of each request, once, when it arrives."""

    def __init__(self, config: VllmConfig, settings: Settings, support: ModelSupport, namespace: Namespace) -> None:
        self.namespace = namespace
        """The namespace of requests without LoRA and without a cache salt."""
        self.adapters = Adapters(namespace.world_size)
        role = config.kv_transfer_config.kv_role if config.kv_transfer_config else None
        self._reads = role != "kv_producer"
        self._stores = settings.store and role != "kv_consumer"
        self._settings = settings
        self._support = support
        self._has_states = bool(support.state_layouts)
        self._noted: set[str] = set()
        ratio = settings.recompute_ratio
        self._finds_ratio = ratio == "auto"
        self.usual_ratio = FIRST_RATIO if ratio == "auto" else ratio
        """The share of moved text that is recomputed where a request names none."""

    def heard(self, ratio: float) -> None:
        """Take note of the ratio that the hub has found."""
        if self._finds_ratio:
            self.usual_ratio = ratio

    def admit(self, request: Request) -> tuple[Terms, Refusal | None]:
        """The request's terms, and why it reads nothing."""
        lora = request.lora_request
        adapter = self.adapters.find(lora) if lora else None
        if lora and lora.load_inplace:  # what is known may be of before
            adapter = None
        variant = Variant(adapter.weights if adapter else NOT_KNOWN if lora else "")
        try:
            variant = Variant(variant.lora, request.cache_salt or "")
            overrides = read_request(request.kv_transfer_params)
        except (InvalidInput, OptionError) as error:
            overrides = RequestSettings(mode="off", store=False)
            refusal: Refusal | None = Refusal(Why.BAD_REQUEST, str(error))
        else:
            refusal = self._refusal(request, overrides, adapter)
            self._note_foreign_keys(request)
        mode = overrides.mode or self._settings.mode
        # vLLM sets the LoRA mapping for its own forwards only.
        blends = self._support.blends and request.lora_request is None
        if mode in MOVING and not blends:
            mode = "exact"
        terms = Terms(
            variant=variant,
            adapter=adapter,
            mode=mode,
            ratio=self._ratio(overrides),
            teaches=self._finds_ratio and overrides.recompute_ratio is None and not request.cache_salt,
            stores=self._stores and overrides.store and not _why_unsupported(request),
            donates_from=self._settings.policy.min_donor_context
            if overrides.donate or self._settings.donors == "all"
            else NOWHERE,
            donates=overrides.donate and self._settings.donors == "trusted",
            explains=overrides.explain,
            audit=overrides.audit,
            settles=overrides.settled and mode in MOVING and not refusal,
            fills_holes=blends and mode != "contiguous",
            repair=overrides.repair or self._settings.repair,
            doubt=self._doubt(request, overrides),
            repairable=blends and not is_split(request.kv_transfer_params),
            received_from=overrides.approximate_from if has_remote_prefill(request.kv_transfer_params) else None,
        )
        return terms, refusal

    def _ratio(self, overrides: RequestSettings) -> float:
        """The share of moved text to recompute. Of a model with recurrent layers, a segment is of use only whole."""
        if self._has_states:
            return 0.0
        return self.usual_ratio if overrides.recompute_ratio is None else overrides.recompute_ratio

    def _doubt(self, request: Request, overrides: RequestSettings) -> float:
        """The margin of doubt. Where tokens are drawn by chance, none is held."""
        if not self._support.holds or not is_greedy(request.sampling_params):
            return 0.0
        return self._settings.doubt if overrides.doubt is None else overrides.doubt

    def _note_foreign_keys(self, request: Request) -> None:
        """Log each key once: it may be meant for another connector, or be a mistake."""
        for key in foreign_keys(request.kv_transfer_params):
            # Clients choose these keys, so their number is bounded here.
            if key not in self._noted and len(self._noted) < MAX_NOTED:
                self._noted.add(key)
                log.warning(
                    "kv_transfer_params of request %s has the key %r; BlendHub reads only %r and ignores others",
                    request.request_id, key, KEY,
                )  # fmt: skip

    def _refusal(self, request: Request, overrides: RequestSettings, adapter: Adapter | None) -> Refusal | None:
        mode = overrides.mode or self._settings.mode
        if mode == "off":
            return Refusal(Why.OFF, "mode is off" + (" for this request" if overrides.mode else ""))
        if not self._reads:
            return Refusal(Why.ROLE, "kv_role is kv_producer: this engine stores and reads nothing")
        if unsupported := _why_unsupported(request):
            return Refusal(Why.REQUEST, unsupported)
        if has_remote_prefill(request.kv_transfer_params):
            return Refusal(
                Why.OTHER_CONNECTOR, "another engine has computed the prompt, and another connector loads it"
            )
        if request.lora_request and not adapter:
            return Refusal(Why.ADAPTER, _why_unknown(request.lora_request))
        return None


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
        """The names that got other weights, in that order. Names that were loaded too long ago are forgotten."""

    def report(self, adapters: Mapping[int, Mapping[int, LoadedAdapter]]) -> None:
        """Take note of all adapters that these ranks have loaded now."""
        self._loaded.update(adapters)
        for number in {number for loaded in adapters.values() for number in loaded}:
            self._compare(number)

    def find(self, lora: LoRARequest) -> Adapter | None:
        """The adapter of a request, if all ranks have loaded it."""
        number, name = lora.lora_int_id, lora.lora_name
        name_before = self._names.get(number)
        put_last(self._names, number, name, MAX_NAMED)
        # What vLLM reads for the request, if in place, is in the next report.
        if name_before != name and not lora.load_inplace:
            self._compare(number)
        return self._find(number)

    def was_replaced(self, lora: LoRARequest) -> bool:
        """Whether vLLM's own cache may hold KV of other weights under the adapter's name."""
        return lora.lora_name in self._replaced

    def _find(self, number: int) -> Adapter | None:
        ranks = [loaded[number] for loaded in self._loaded.values() if number in loaded]
        if len(ranks) < len(self._loaded):
            return None
        weights = blake2b(" ".join(adapter.weights for adapter in ranks).encode(), digest_size=16).hexdigest()
        return Adapter(number, weights, max(adapter.since for adapter in ranks))

    def _compare(self, number: int) -> None:
        name, adapter = self._names.get(number), self._find(number)
        if name is None or adapter is None or self._weights.get(name) == adapter.weights:
            return
        log.info("LoRA adapter %s is loaded; its KV is kept under %s", name, adapter.weights)
        if name in self._weights and name not in self._replaced:
            put_last(self._replaced, name, None, MAX_NAMED)
            log.warning(
                "LoRA adapter %s has other weights than before. vLLM's own prefix cache may not tell them apart, so "
                "what is computed behind it is not stored; load changed weights under a new name",
                name,
            )
        put_last(self._weights, name, adapter.weights, MAX_NAMED)


def _why_unknown(lora: LoRARequest) -> str:
    """Why the weights that vLLM would compute a request with are unknown."""
    if lora.load_inplace:
        return "vLLM reads the LoRA adapter anew for each step of the request: it was loaded with load_inplace"
    return (
        "no step has computed with the LoRA adapter since vLLM loaded it, or vLLM has dropped it; "
        "--max-cpu-loras says how many it keeps"
    )


def _why_unsupported(request: Request) -> str:
    """Why a request's KV does not follow from its token ids, or is useless to other requests; empty if it is useful."""
    if request.mm_features and not text_end(request):
        return "the prompt begins with an image, sound or video, and only text before the first of them is reused"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompts given as embeddings are not supported"
    if request.pooling_params is not None:
        return "pooling requests are not supported"
    if getattr(request, "resumable", False):  # not every vLLM has these
        return "prompts whose parts come one after the other are not supported"
    return ""
