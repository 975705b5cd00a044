"""Which requests take part, in which namespace, and how far."""

import logging
from pathlib import Path

import msgspec
from vllm.config import VllmConfig
from vllm.v1.request import Request

from blendhub.errors import OptionError
from blendhub.layout import Namespace
from blendhub.vllm.decision import Refusal
from blendhub.vllm.scheduler.request_state import RequestState
from blendhub.vllm.settings import KEY, RequestSettings, Settings, foreign_keys, read_request
from blendhub.vllm.worker.model.model_check import ModelSupport

log = logging.getLogger(__name__)
MOST_NOTED = 32


class Admission:
    """Looks at each request once, when it arrives."""

    def __init__(self, config: VllmConfig, settings: Settings, gate: ModelSupport, namespace: Namespace) -> None:
        self.namespace = namespace
        """That of requests without LoRA and without a cache salt."""
        role = config.kv_transfer_config.kv_role if config.kv_transfer_config else None
        self._reads = role != "kv_producer"
        self._stores = settings.store and role != "kv_consumer"
        self._settings = settings
        self._gate = gate
        self._noted: set[str] = set()

    def admit(self, request: Request, obstacle: Refusal | None = None) -> RequestState:
        """``obstacle`` keeps every request from reading and storing just now."""
        namespace = self._namespace_of(request)
        try:
            asked = read_request(request.kv_transfer_params)
        except OptionError as error:
            asked = RequestSettings(mode="off", store=False)
            refusal: Refusal | None = Refusal("bad_request", str(error))
        else:
            refusal = self._refusal(request, asked) or obstacle
            self._note_foreign_keys(request)
        mode = asked.mode or self._settings.mode
        if mode == "blend" and not (self._gate.blends and request.lora_request is None):
            mode = "exact"
        ratio = self._settings.recompute_ratio if asked.recompute_ratio is None else asked.recompute_ratio
        stores = self._stores and asked.store and not _is_strange(request) and not obstacle
        return RequestState(request, namespace, mode, ratio, refusal, stores, asked.explain)

    def holes_for(self, request: Request) -> bool:
        """Whether holes of this request may be computed apart."""
        # The engine's LoRA mapping is set for its own forwards only.
        return self._gate.blends and request.lora_request is None

    def _note_foreign_keys(self, request: Request) -> None:
        """They may be meant for another connector, or for this one by mistake: each is logged once."""
        for key in foreign_keys(request.kv_transfer_params):
            # Clients choose these words: there may be any number of them.
            if key not in self._noted and len(self._noted) < MOST_NOTED:
                self._noted.add(key)
                log.warning(
                    "kv_transfer_params of request %s has the key %r; BlendHub reads only %r and ignores others",
                    request.request_id, key, KEY,
                )  # fmt: skip

    def _refusal(self, request: Request, asked: RequestSettings) -> Refusal | None:
        mode = asked.mode or self._settings.mode
        if mode == "off":
            return Refusal("off", "mode is off" + (" for this request" if asked.mode else ""))
        if not self._reads:
            return Refusal("role", "kv_role is kv_producer: this engine stores and reads nothing")
        strange = _is_strange(request)
        return Refusal("request", strange) if strange else None

    def _namespace_of(self, request: Request) -> Namespace:
        lora = request.lora_request
        return msgspec.structs.replace(
            self.namespace,
            lora=f"{lora.lora_name} {lora.lora_path} {_age_of(lora.lora_path)}" if lora else "",
            cache_salt=request.cache_salt or "",
        )


def _is_strange(request: Request) -> str:
    """Why a request's tokens do not tell its KV, or nobody could use it; empty if all is well."""
    if request.mm_features:
        return "prompts with images, sound or video are not supported"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompts given as embeddings are not supported"
    if request.pooling_params is not None:
        return "pooling requests are not supported"
    return ""


def _age_of(path: str) -> int:
    """When an adapter was last changed: another one may be put in the same place."""
    try:
        return max(entry.stat().st_mtime_ns for entry in Path(path).iterdir())
    except (OSError, ValueError):
        return 0  # it is not a directory here, but a name that vLLM resolves
