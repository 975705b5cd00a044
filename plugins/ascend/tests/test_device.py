"""Options and errors of the Ascend device that the contract does not cover."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blendhub_ascend import device as device_module
from msgspec.structs import replace

from blendhub.core.errors import Unsupported
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary
from plugins.ascend.tests.npu_stand_ins import A2, UNKNOWN, WIDE, device_on_npu_runtime

SETUP = DeviceSetup(format="split", kv_heads=2, block_size=16, **WIDE)


def test_pages_in_a_private_format_are_refused(monkeypatch):
    fractal: Any = SimpleNamespace(device=SimpleNamespace(type="npu"))

    class Operators:
        class npu:
            get_npu_format = staticmethod(lambda tensor: 29)

    monkeypatch.setattr(torch, "ops", Operators)
    with pytest.raises(Unsupported, match=r"private format 29 of torch_npu.*enable_kv_nz"):
        device_module._refuse_private_format("layer 3", fractal)


# vllm-ascend keeps an MLA layer as its rotated part of 64 and its latent of 512, each with one head. Other models have
# blocks of 128 tokens.
MLA = {"kv_heads": 1, "key_dim": 64, "value_dim": 512}
DENSE = {"key_dim": 128, "value_dim": 128, "block_size": 128, "chunk_tokens": 256, "n_blocks": 8, "n_shards": 3}


@pytest.mark.parametrize("soc_version", [A2, UNKNOWN])
@pytest.mark.parametrize("neox, sizes", [(True, MLA), (False, MLA), (True, DENSE)])
def test_layers_of_the_shape_of_vllm_ascend_s_pages(soc_version, neox, sizes):
    rotation = Rotary(width=sizes["key_dim"], neox=neox, positions=4096)
    setup = replace(SETUP, rotations=(rotation, rotation, None), **sizes)
    harness = DeviceHarness(device_on_npu_runtime(soc_version), "cpu", setup)
    end = min(harness.n_tokens, 600)
    harness.load(harness.chunks(5, min(end, 5 * harness.layout.chunk_tokens), source=3000), 7)
    harness.overwrite_pages()
    harness.save(harness.chunks(5, min(end, 3 * harness.layout.chunk_tokens)))
    harness.device.close()
