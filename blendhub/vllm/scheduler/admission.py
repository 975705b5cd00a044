"""Admission: which requests read and store KV, in which namespace, and in which mode."""

import logging

from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from blendhub.core.errors import InvalidInput, OptionError
from blendhub.core.layout import Namespace, Variant
from blendhub.outcome.reasons import Why
from blendhub.vllm.decision import Refusal
from blendhub.vllm.messages import Adapter
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.scheduler.adapters import Adapters
from blendhub.vllm.scheduler.request_state import MOVING, Terms
from blendhub.vllm.settings import KEY, RequestSettings, Settings, foreign_keys, read_request

log = logging.getLogger(__name__)
MOST_NOTED = 32
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
        self._noted: set[str] = set()

    def admit(self, request: Request) -> tuple[Terms, Refusal | None]:
        """The request's terms, and why it reads nothing."""
        lora = request.lora_request
        adapter = self.adapters.find(lora) if lora else None
        if lora and lora.load_inplace:  # what is known may be of before
            adapter = None
        variant = Variant(adapter.weights if adapter else NOT_KNOWN if lora else "")
        try:
            variant = Variant(variant.lora, request.cache_salt or "")
            asked = read_request(request.kv_transfer_params)
        except (InvalidInput, OptionError) as error:
            asked = RequestSettings(mode="off", store=False)
            refusal: Refusal | None = Refusal(Why.BAD_REQUEST, str(error))
        else:
            refusal = self._refusal(request, asked, adapter)
            self._note_foreign_keys(request)
        mode = asked.mode or self._settings.mode
        if mode in MOVING and not (self._support.blends and request.lora_request is None):
            mode = "exact"
        terms = Terms(
            variant=variant,
            adapter=adapter,
            mode=mode,
            ratio=asked.recompute_ratio,
            stores=self._stores and asked.store and not _why_unsupported(request),
            explains=asked.explain,
            audit=asked.audit,
            settles=asked.settled and mode in MOVING and not refusal,
        )
        return terms, refusal

    def holes_for(self, request: Request) -> bool:
        """Whether holes of this request may be computed apart from the engine's own prefill."""
        # vLLM sets the LoRA mapping for its own forwards only.
        return self._support.blends and request.lora_request is None

    def _note_foreign_keys(self, request: Request) -> None:
        """Log each key once: it may be meant for another connector, or be a mistake."""
        for key in foreign_keys(request.kv_transfer_params):
            # Clients choose these keys, so their number is bounded here.
            if key not in self._noted and len(self._noted) < MOST_NOTED:
                self._noted.add(key)
                log.warning(
                    "kv_transfer_params of request %s has the key %r; BlendHub reads only %r and ignores others",
                    request.request_id, key, KEY,
                )  # fmt: skip

    def _refusal(self, request: Request, asked: RequestSettings, adapter: Adapter | None) -> Refusal | None:
        mode = asked.mode or self._settings.mode
        if mode == "off":
            return Refusal(Why.OFF, "mode is off" + (" for this request" if asked.mode else ""))
        if not self._reads:
            return Refusal(Why.ROLE, "kv_role is kv_producer: this engine stores and reads nothing")
        if unsupported := _why_unsupported(request):
            return Refusal(Why.REQUEST, unsupported)
        if request.lora_request and not adapter:
            return Refusal(Why.ADAPTER, _why_unknown(request.lora_request))
        return None


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
    if request.mm_features:
        return "prompts with images, sound or video are not supported"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompts given as embeddings are not supported"
    if request.pooling_params is not None:
        return "pooling requests are not supported"
    if getattr(request, "resumable", False):  # not every vLLM has these
        return "prompts whose parts come one after the other are not supported"
    return ""
