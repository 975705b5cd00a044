"""The start of a worker: kernels are compiled before vLLM warms the model up, and the model is checked after it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group

from blendhub.contracts import Device, Rotation, Selector
from blendhub.core.errors import BlendHubError, InvalidInput, Unsupported
from blendhub.framework.host import PluginHost
from blendhub.vllm.messages import WorkerProof
from blendhub.vllm.model.attention_probe import AttentionProbe
from blendhub.vllm.model.checks.model_check import (
    BESIDE_OTHERS,
    ONLY_PREFIXES,
    ModelCheck,
    check_model,
    groups_and_rotations,
    possible_rotations,
)
from blendhub.vllm.model.checks.parts_check import tolerance
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.layer_groups import (
    LayerGroup,
    StateGroup,
    attach,
    attention_of,
    pages_of,
    split,
    state_groups,
)
from blendhub.vllm.model.platform import Platform
from blendhub.vllm.model.rotary import digest
from blendhub.vllm.model.runner import find_caller
from blendhub.vllm.model_support import ModelSupport, Neighbours, beside, unsupported
from blendhub.vllm.ranks import Ranks
from blendhub.vllm.settings import Settings
from blendhub.vllm.worker.audit import check_predictions
from blendhub.vllm.worker.connector_worker import ConnectorWorker
from blendhub.vllm.worker.recompute import BlendContext
from blendhub.vllm.worker.start.attention_choice import choose_attention
from blendhub.vllm.worker.start.device_memory import DeviceMemory
from blendhub.vllm.worker.start.graph_choice import choose_graphs
from blendhub.vllm.worker.start.measured_costs import measure_costs

log = logging.getLogger(__name__)
NewPlatform = Callable[[Any, VllmConfig], Platform]
"""Makes the platform of a model runner."""


class WorkerStart:
    """``register`` before vLLM warms the model up, ``finish`` after it. What fails closes reuse, with a sentence.

    A wrong setting ends vLLM's start instead.
    """

    def __init__(
        self, config: VllmConfig, settings: Settings, host: PluginHost, engine_id: str, new_platform: NewPlatform
    ) -> None:
        self._config = config
        self._settings = settings
        self._host = host
        self._engine_id = engine_id
        self._new_platform = new_platform
        self._model: EngineModel | None = None
        self._groups: tuple[LayerGroup, ...] = ()
        self._states: tuple[StateGroup, ...] = ()
        self._rotations: list[Rotation] = []
        self._rotary = ""
        """The digests of all rotations that the model's keys may have: KV depends on them, also where it is not moved.
        """
        self._memory = DeviceMemory()
        self._refusal = "vLLM registered no KV caches"

    def register(self) -> None:
        """Prepare everything that needs no forward, while vLLM's monitor of compilations is not yet armed."""
        try:
            runner = find_caller("initialize_kv_cache", "execute_model")
            with self._memory.counted(runner.device):
                self._model = EngineModel(runner, self._config, self._new_platform(runner, self._config))
                chunk_tokens = self._model.chunk_tokens(self._settings.chunk_tokens)
                self._groups, self._rotations = groups_and_rotations(self._model, chunk_tokens)
                self._states = state_groups(self._model, chunk_tokens)
                self._rotary = _digests(self._rotations or possible_rotations(self._model, self._groups))
            compile_kernels(self._new_device, self._model, self._groups, self._rotations, self._states)
            self._refusal = ""
        except InvalidInput:  # an option of the device is wrong
            raise
        except Exception as error:
            self._refusal = _sentence(error)

    def finish(self, neighbours: Neighbours | None = None) -> tuple[WorkerProof, ConnectorWorker | None]:
        """Check the model, on all ranks alike. ``neighbours``: None if BlendHub's connector stands alone."""
        ranks = Ranks(get_tp_group())
        try:
            if neighbours:
                neighbours.check_policy()
            model = ranks.together(self._registered)
            with self._memory.counted(model.device):
                check, worker = self._examined(model, ranks, neighbours)
        except Exception as error:
            return WorkerProof(ranks.number, unsupported(_sentence(error))), None
        if worker:
            self._memory.log_how_much(model)
        rotary = _digests(check.rotations) or self._rotary
        return WorkerProof(ranks.number, check.support, worker.weights if worker else "", rotary), worker

    def _registered(self) -> EngineModel:
        if self._refusal or not self._model:
            raise Unsupported(self._refusal)
        return self._model

    def _examined(
        self, model: EngineModel, ranks: Ranks, neighbours: Neighbours | None
    ) -> tuple[ModelCheck, ConnectorWorker | None]:
        chosen = self._settings.selector
        selector: Selector = self._host.create("selector", chosen.name, chosen.options)
        unmoved = "" if self._settings.policy.moves_states else ONLY_PREFIXES
        if neighbours:
            unmoved = unmoved or BESIDE_OTHERS
        check = check_model(model, self._groups, self._rotations, selector, ranks, self._states, unmoved_states=unmoved)
        self._rotations.clear()  # tables that no layer uses are freed
        if not check.support.layouts:
            return check, None
        if check.support.blends and neighbours:
            # With the rotations, which are in the namespace: engines beside no other connector share what is stored.
            check = check._replace(support=beside(neighbours, check.support))
        if check.support.blends:
            check = check._replace(support=with_audits(check.support, model, ranks))
        layers = pages_of(model, self._groups, check.rotations)
        attention, n_probed = None, 0 if self._states else selector.probe_layer and selector.probe_layer + 1
        if check.support.blends and check.measures_attention:
            attention = AttentionProbe(model, layers, selector.attended_layers)
            n_probed = max(n_probed, attention.last + 1)
        device = self._new_device()
        groups = split(self._groups, n_probed) if device.overlaps_compute else self._groups
        try:
            ranks.together(lambda: attach(device, groups, layers, self._states))
        except BaseException:
            device.close()
            raise
        if check.support.blends and not self._states:
            choose_graphs(model, tolerance(layers[0]), ranks)
            choose_attention(model, device, groups, tolerance(layers[0]), ranks)
            if attention:
                self._memory.probe_bytes = attention.memory(model.config.model_config.max_model_len)
        context = BlendContext(
            model, layers, groups, device, selector, ranks, attention, neighbours is not None, self._states
        )
        if check.support.blends:
            costs = measure_costs(context)
            check = check._replace(support=msgspec.structs.replace(check.support, costs=costs))
        worker = ConnectorWorker(context, self._host, self._engine_id, self._settings.lookup_timeout_s)
        if check.support.audits:
            watch = partial(model.watch_sampling, worker.before_sampling)
            check = check._replace(support=with_doubt(check.support, watch, ranks))
        return check, worker

    def _new_device(self) -> Device:
        assert self._settings.device
        device: Device = self._host.create("device", self._settings.device.name, self._settings.device.options)
        return device


def with_audits(support: ModelSupport, model: EngineModel, ranks: Ranks) -> ModelSupport:
    """``support``, completed by whether requests can be audited: on all ranks alike."""
    try:
        ranks.together(lambda: check_predictions(model))
    except Exception as error:
        reason = f"requests are not audited: the model's predictions cannot be had: {_sentence(error)}"
        return msgspec.structs.replace(support, reasons=(*support.reasons, reason))
    return msgspec.structs.replace(support, audits=True)


def with_doubt(support: ModelSupport, watch: Callable[[], None], ranks: Ranks) -> ModelSupport:
    """``support``, completed by whether tokens in doubt are held: on all ranks alike."""
    try:
        ranks.together(watch)
    except Exception as error:
        reason = f"tokens that the model is in doubt about are not held: {_sentence(error)}"
        return msgspec.structs.replace(support, reasons=(*support.reasons, reason))
    return msgspec.structs.replace(support, holds=True)


def compile_kernels(
    new_device: Callable[[], Device],
    model: EngineModel,
    groups: Sequence[LayerGroup],
    rotations: Sequence[Rotation],
    states: Sequence[StateGroup] = (),
) -> None:
    """Have a device compile its kernels for each way in which the layers' keys may be rotated.

    Which way is right shows only after the model was warmed up. vLLM's monitor is armed then, and reports or refuses
    each compilation (``--jit-monitor-mode``); what was compiled stays so for the device that serves.
    """
    for forms in _variants(rotations):
        device = new_device()
        try:
            of_layers = [forms[number % len(forms)] for number in range(len(model.layer_names))]
            attach(device, groups, pages_of(model, groups, of_layers), states)
            # The device that serves fails alike, and that is logged.
            with suppress(Exception):
                attention_of(device, groups, model)
        finally:
            device.close()


def _variants(rotations: Sequence[Rotation]) -> Iterator[Sequence[Rotation | None]]:
    """Rotations to compile together: kernels depend on where in a key they rotate, not on angles or pairing.

    No layer may have rotation, all the same, or all of those that the model has.
    """
    places = list({(rotation.cos_sin.shape[1], rotation.offset): rotation for rotation in rotations}.values())
    yield [None]
    yield from ([rotation] for rotation in places)
    if len(places) > 1:
        yield places


def _digests(rotations: Sequence[Rotation | None]) -> str:
    return " ".join(dict.fromkeys(map(digest, rotations)))


def _sentence(error: Exception) -> str:
    if isinstance(error, BlendHubError):
        return str(error)
    log.error("the model could not be examined", exc_info=error)
    return f"the model could not be examined: {type(error).__name__}: {error}"
