"""The start of a worker: what is done before vLLM watches for compilations, and what closes reuse or ends the start."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blendhub.core.errors import InvalidInput, Unsupported
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm.model.checks import model_check
from blendhub.vllm.model_support import Neighbours
from blendhub.vllm.settings import Settings
from blendhub.vllm.worker.start import worker_start
from blendhub.vllm.worker.start.device_memory import DeviceMemory
from blendhub.vllm.worker.start.worker_start import WorkerStart
from tests.stand_in import StandIn
from tests.vllm.blending import HOST
from tests.vllm.stand_in_model import StandInModel, rotary
from tests.vllm.two_ranks import ALONE, forward_together, on_two_ranks

PLACE = torch.device("cpu")


class Noted(StandIn):
    """A device, which is closed when ``is_closed``."""

    block_tokens, overlaps_compute, is_closed = 16, True, False

    def attention(self, rules, dtype, group):
        return None

    def close(self):
        self.is_closed = True


class Start(WorkerStart):
    """With stand-ins for vLLM's runner, its model and the device; the selector is real.

    ``fails`` gives the error of an attachment, from its number.
    """

    def __init__(self, monkeypatch, *rotaries, fails=lambda number: None, ranks=ALONE):
        self.devices: list[Any] = []
        self.attached: list[Any] = []
        model = StandInModel(forward_together if ranks.count > 1 else lambda tensor: tensor)
        model.module.others = torch.nn.ModuleList(rotaries)

        def attach(layers, block_size, layout):
            self.attached.append([layer.rotation for layer in layers])
            if error := fails(len(self.attached)):
                raise error

        def create(kind, name, options):
            if kind == "selector":
                return HOST.create(kind, name, options)
            self.devices.append(Noted(attach=attach))
            return self.devices[-1]

        monkeypatch.setattr(worker_start, "find_caller", lambda *methods: SimpleNamespace(device=PLACE))
        monkeypatch.setattr(worker_start, "EngineModel", lambda runner, config, platform: model)
        monkeypatch.setattr(worker_start, "get_tp_group", lambda: ranks._group)
        chosen = Settings(device=PluginChoice("noted"), chunk_tokens=32)
        super().__init__(None, chosen, StandIn(create=create), "engine", lambda runner, config: None)

    def started(self, neighbours=None):
        self.register()
        return self.finish(neighbours)


def test_kernels_are_compiled_before_the_warm_up_for_every_form_of_rotation(monkeypatch):
    start = Start(monkeypatch, rotary(width=8), rotary(base=500.0))
    start.register()
    forms = [[rotation and rotation.cos_sin.shape[1] for rotation in rotations] for rotations in start.attached]
    assert forms == [[None, None], [16, 16], [8, 8], [16, 8]]
    assert all(device.is_closed for device in start.devices)
    proof, worker = start.finish()
    assert proof.support.blends and worker
    assert [rotation.cos_sin.shape[1] for rotation in start.attached[-1]] == [16, 16] and not start._rotations
    assert len(start.attached) == 5 and not start.devices[-1].is_closed


@pytest.mark.parametrize(
    "before, behind, sentence",
    [
        ((), ("ExampleConnector",), "beside ExampleConnector, which may store what was blended as exact"),
        (("OffloadingConnector",), (), "behind OffloadingConnector, .* name BlendHubConnector before it"),
        ((), ("OffloadingConnector", "SimpleCPUOffloadConnector"), ""),
        (("NixlConnector",), (), ""),
    ],
)
def test_text_is_moved_beside_connectors_that_take_no_blended_kv_for_exact(monkeypatch, before, behind, sentence):
    alone, worker_alone = Start(monkeypatch).started()
    beside, worker = Start(monkeypatch).started(Neighbours("recompute", before, behind))
    assert alone.support.blends and not alone.support.shows_hashes and worker
    assert beside.support.blends is not bool(sentence)
    assert not sentence or re.search(sentence, beside.support.reasons[0])
    assert beside.support.shows_hashes == ("OffloadingConnector" in behind)
    assert worker._context.is_beside_others and worker_alone and not worker_alone._context.is_beside_others
    # Engines that differ in their neighbours share what is stored.
    assert (alone.support.layouts, alone.rotary) == (beside.support.layouts, beside.rotary) and alone.rotary


def test_a_model_that_moves_no_text_shares_none_with_one_whose_keys_are_rotated_otherwise(monkeypatch):
    def refuse(model):
        raise Unsupported("a rank of another engine would have to step")

    monkeypatch.setattr(model_check, "_refuse_to_blend", refuse)
    proofs = [Start(monkeypatch, *rotaries).started()[0] for rotaries in ((), (), (rotary(base=500.0),))]
    assert all(proof.support.layouts and not proof.support.blends for proof in proofs)
    assert proofs[0].rotary == proofs[1].rotary != proofs[2].rotary


@pytest.mark.parametrize("at", [1, 2, 3], ids=["no rotation", "rotation", "serving"])
def test_whatever_an_attachment_raises_on_a_rank_closes_reuse_on_all_with_its_sentence(monkeypatch, at):
    for error in (RuntimeError("PassManager::run failed"), Unsupported("device 'cuda' cannot be set up")):
        start = Start(monkeypatch, fails=lambda number, error=error: error if number == at else None)
        proof, worker = start.started()
        assert worker is None and proof.support.layouts == () and str(error) in proof.support.reasons[0]
        assert all(device.is_closed for device in start.devices)

    def work(ranks):
        def fails(number):
            return RuntimeError("no memory for staging") if ranks.number and number == at else None

        proof, worker = Start(monkeypatch, fails=fails, ranks=ranks).started()
        return proof.support.layouts, proof.support.reasons, worker

    for layouts, (reason,), worker in on_two_ranks(work):
        assert layouts == () and worker is None
        assert "no memory for staging" in reason and reason.endswith("(rank 1 of 2)")


def test_a_wrong_option_of_the_device_ends_the_start(monkeypatch):
    start = Start(monkeypatch, fails=lambda number: InvalidInput("staging_mib = 0.1 is too little"))
    with pytest.raises(InvalidInput, match="staging_mib"):
        start.register()


@pytest.mark.parametrize("free_mib, level", [(64, logging.INFO), (63, logging.WARNING)])
def test_memory_that_vllm_does_not_count_is_named_and_how_much_to_leave_free(monkeypatch, caplog, free_mib, level):
    """Of a device with 1000 MiB."""
    mib = 2**20
    gpu = SimpleNamespace(allocated=700 * mib, mem_get_info=lambda device: (free_mib * mib, 1000 * mib))
    gpu.memory_allocated = lambda device: gpu.allocated
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    memory, place = DeviceMemory(), torch.device("cuda", 0)
    for kept in (30, 6):
        with memory.counted(place):
            gpu.allocated += kept * mib
    with caplog.at_level(logging.INFO):
        memory.log_how_much(StandIn(device=place, metadata_bytes=64 * mib))
    ((_, seen, line),) = caplog.record_tuples
    assert seen == level
    assert "keeps 36 MiB and takes up to 64 MiB for a while" in line and f"{free_mib} MiB are free" in line
    assert ("lower --gpu-memory-utilization by 0.100" in line) == (level == logging.WARNING)
