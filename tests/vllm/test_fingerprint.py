"""The name of a model's weights, without a copy of them."""

import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blendhub.vllm.model.fingerprint import fingerprint


def model_of(**parameters):
    module = torch.nn.Module()
    for name, values in parameters.items():
        module.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    return module


WEIGHT = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))


class Copies(TorchDispatchMode):
    """Notes the items of the largest tensor that has other memory than the model."""

    def __init__(self, model):
        super().__init__()
        self.items = 0
        self._known = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in self._known:
            self.items = max(self.items, made.numel())
        return made


def test_a_transposed_parameter_is_not_copied():
    model = model_of(weight=WEIGHT.clone().T)
    with Copies(model) as copies:
        fingerprint(model)
    assert copies.items < 1000


def test_the_name_follows_from_the_items_in_their_order():
    assert fingerprint(model_of(weight=WEIGHT.T.contiguous())) == fingerprint(model_of(weight=WEIGHT.clone().T))
    assert fingerprint(model_of(weight=WEIGHT)) != fingerprint(model_of(weight=WEIGHT + 1))
    assert fingerprint(model_of(weight=WEIGHT)) != fingerprint(model_of(weight=WEIGHT.reshape(200, 300)))


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor(3.0),
        torch.zeros(0, 4),
        torch.ones(5, 3).to(torch.float8_e4m3fn).T,
        torch.ones(70, dtype=torch.int8),
    ],
    ids=["no dimension", "empty", "8-bit floats", "integers"],
)
def test_parameters_of_every_kind(values):
    assert len(fingerprint(model_of(weight=values))) == 32
