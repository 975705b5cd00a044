"""The start of a worker: what is done before vLLM watches for compilations, and what closes reuse or ends the start."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from blendhub import PluginHost
from blendhub.core.errors import InvalidInput, Unsupported
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm.model.device_memory import DeviceMemory
from blendhub.vllm.model_support import Neighbours, neighbours_of
from blendhub.vllm.settings import Settings
from blendhub.vllm.worker import worker_start
from blendhub.vllm.worker.worker_start import WorkerStart
from tests.stand_in import StandIn
from tests.vllm.stand_in_model import StandInModel, rotary
from tests.vllm.two_ranks import forward_together, on_two_ranks


class Device:
    """Notes what it was attached to; ``fails`` decides from the number of the attachment."""

    torch_type = "cpu"
    block_tokens, overlaps_compute = 16, True

    def __init__(self, attached, fails):
        self._attached = attached
        self._fails = fails
        self.is_closed = False

    def attach(self, layers, block_size, layout):
        self._attached.append([layer.rotation for layer in layers])
        if error := self._fails(len(self._attached)):
            raise error

    def attention(self, rules, dtype):
        return None

    def close(self):
        self.is_closed = True


class Start(WorkerStart):
    """With stand-ins for vLLM's runner, its model and the device; the selector is real."""

    def __init__(self, monkeypatch, model, fails=lambda number: None, group=None):
        host, self.devices, self.attached = PluginHost.discover(), [], []

        def create(kind, name, options):
            if kind == "selector":
                return host.create(kind, name, options)
            self.devices.append(Device(self.attached, fails))
            return self.devices[-1]

        monkeypatch.setattr(worker_start, "find_caller", lambda *methods: SimpleNamespace(device=torch.device("cpu")))
        monkeypatch.setattr(worker_start, "EngineModel", lambda runner, config, platform: model)
        alone = SimpleNamespace(rank_in_group=0, world_size=1)
        monkeypatch.setattr(worker_start, "get_tp_group", lambda: group or alone)
        settings = Settings(device=PluginChoice("noted"), chunk_tokens=32)
        super().__init__(None, settings, StandIn(create=create), "engine", lambda runner, config: None)


def model_of(*rotaries, together=lambda tensor: tensor):
    model = StandInModel(together, n_layers=2)
    model.module.others = torch.nn.ModuleList(rotaries)
    return model


def test_kernels_are_compiled_before_the_warm_up_for_every_form_of_rotation(monkeypatch):
    start = Start(monkeypatch, model_of(rotary(width=8), rotary(base=500.0)))
    start.register()
    forms = [[one and one.cos_sin.shape[1] for one in rotations] for rotations in start.attached]
    assert forms == [[None, None], [16, 16], [8, 8], [16, 8]]
    assert all(device.is_closed for device in start.devices)
    proof, worker = start.finish()
    assert proof.support.blends and worker
    assert [one.cos_sin.shape[1] for one in start.attached[-1]] == [16, 16] and not start._rotations
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
    proofs = []
    for neighbours in (None, Neighbours("recompute", before, behind)):
        start = Start(monkeypatch, model_of())
        start.register()
        proof, worker = start.finish(neighbours)
        assert worker
        proofs.append(proof)
    alone, beside = proofs
    assert alone.support.blends and not alone.support.shows_hashes and beside.support.blends is not bool(sentence)
    assert not sentence or re.search(sentence, beside.support.reasons[0])
    assert beside.support.shows_hashes == ("OffloadingConnector" in behind)
    # Engines that differ in their neighbours share what is stored.
    assert (alone.support.layouts, alone.rotary) == (beside.support.layouts, beside.rotary) and alone.rotary


def test_an_outer_connector_with_which_failed_loads_end_requests_closes_reuse_and_names_the_key(monkeypatch):
    start = Start(monkeypatch, model_of())
    start.register()
    proof, worker = start.finish(Neighbours("fail"))
    assert worker is None and proof.support.layouts == ()
    assert 'set "kv_load_failure_policy": "recompute" beside "kv_connector"' in proof.support.reasons[0]


def test_neighbours_are_those_of_vllm_s_connector_and_unknown_where_it_does_not_say():
    config = SimpleNamespace(kv_load_failure_policy="recompute")
    own, other = SimpleNamespace(), Device([], None)
    outer = SimpleNamespace(_kv_transfer_config=config, sub_connectors=[other, own, other])
    assert neighbours_of(own, own) is None
    assert neighbours_of(own, outer) == Neighbours("recompute", ("Device",), ("Device",))
    old = neighbours_of(own, SimpleNamespace(_kv_transfer_config=config))
    assert "this vLLM does not say which connectors" in old.refusal


@pytest.mark.parametrize("at", [1, 2, 3], ids=["no rotation", "rotation", "serving"])
@pytest.mark.parametrize(
    "error", [RuntimeError("PassManager::run failed"), Unsupported("device 'cuda' cannot be set up")]
)
def test_whatever_an_attachment_raises_closes_reuse_with_its_sentence(monkeypatch, at, error):
    start = Start(monkeypatch, model_of(), lambda number: error if number == at else None)
    start.register()
    proof, worker = start.finish()
    assert worker is None and proof.support.layouts == ()
    (reason,) = proof.support.reasons
    assert str(error) in reason
    assert all(device.is_closed for device in start.devices)


def test_a_wrong_option_of_the_device_ends_the_start(monkeypatch):
    start = Start(monkeypatch, model_of(), lambda number: InvalidInput("staging_mib = 0.1 is too little"))
    with pytest.raises(InvalidInput, match="staging_mib"):
        start.register()


@pytest.mark.parametrize("at", [1, 3], ids=["before the warm-up", "serving"])
def test_an_attachment_that_fails_on_one_rank_closes_reuse_on_both(monkeypatch, at):
    def work(ranks):
        def fails(number):
            return RuntimeError("no memory for staging") if ranks.number and number == at else None

        start = Start(monkeypatch, model_of(together=forward_together), fails, ranks._group)
        start.register()
        proof, worker = start.finish()
        return proof.support.layouts, proof.support.reasons, worker

    for layouts, (reason,), worker in on_two_ranks(work):
        assert layouts == () and worker is None
        assert "no memory for staging" in reason and reason.endswith("(rank 1 of 2)")


class Gpu:
    """torch's module of a device with 1000 MiB, of which vLLM left some."""

    def __init__(self, free_mib):
        self.allocated = 700 * 2**20
        self.free = free_mib * 2**20

    def memory_allocated(self, device):
        return self.allocated

    def mem_get_info(self, device):
        return self.free, 1000 * 2**20


@pytest.mark.parametrize("free_mib, level", [(64, logging.INFO), (63, logging.WARNING)])
def test_memory_that_vllm_does_not_count_is_named_and_how_much_to_leave_free(monkeypatch, caplog, free_mib, level):
    gpu = Gpu(free_mib)
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    memory, place = DeviceMemory(), torch.device("cuda", 0)
    for mib in (30, 6):
        with memory.counted(place):
            gpu.allocated += mib * 2**20
    with caplog.at_level(logging.INFO):
        memory.log_how_much(StandIn(device=place, metadata_bytes=64 * 2**20))
    ((_, found, line),) = caplog.record_tuples
    assert found == level
    assert "keeps 36 MiB and takes up to 64 MiB for a while" in line and f"{free_mib} MiB are free" in line
    assert ("lower --gpu-memory-utilization by 0.100" in line) == (level == logging.WARNING)
