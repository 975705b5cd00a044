"""The names of a model's and of an adapter's weights, without a copy of them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

from blendhub.vllm.model.fingerprint import adapter_fingerprint, fingerprint

WEIGHT = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))


def name_of(weight):
    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    return fingerprint(module)


class LargestTensor(TorchDispatchMode):
    """Notes the items of the largest tensor that has other memory than the weight."""

    items = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != WEIGHT.untyped_storage().data_ptr():
            self.items = max(self.items, made.numel())
        return made


def test_the_name_follows_from_the_items_in_their_order_and_no_parameter_is_copied():
    with LargestTensor() as largest:
        transposed = name_of(WEIGHT.T)
    assert largest.items < 1000 and transposed == name_of(WEIGHT.T.contiguous())
    kinds = torch.tensor(3.0), torch.zeros(0, 4), torch.ones(5, 3).to(torch.float8_e4m3fn).T, torch.ones(70).char()
    assert len({transposed, *map(name_of, (WEIGHT, WEIGHT + 1, WEIGHT.view(200, 300), *kinds))}) == 8


def adapter_of(value=1.0, *, at=(7, 3), scaling=1.0):
    """An adapter of vLLM's with a packed layer, one of whose parts it leaves as it is."""
    down, up = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(32, 8, dtype=torch.bfloat16)
    up[at[0] :, at[1] :] = value
    packed = PackedLoRALayerWeights("m.qkv", 8, [8, None], [down, None], [up.clone(), None], [1.0, None])
    return LoRAModel(1, 8, {"m.qkv": packed, "m.o": LoRALayerWeights("m.o", 8, 8, down, up, scaling)})


def test_every_tensor_of_an_adapter_counts():
    adapters = adapter_of(), adapter_of(), adapter_of(2.0), adapter_of(2.0, at=(20, 3)), adapter_of(scaling=2.0)
    names = [*map(adapter_fingerprint, adapters)]
    assert names[0] == names[1] and len(set(names)) == 4
