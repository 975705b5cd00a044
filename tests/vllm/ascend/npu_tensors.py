"""Tensors of a device ``npu`` whose memory is the CPU's: what mixes devices raises, as it would on an NPU.

The device is torch's PrivateUse1, renamed as torch_npu renames it. Nothing is compiled: every operator computes on the
CPU tensors inside, after a check that all of its tensors lie on one device.
"""

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
BETWEEN_DEVICES = (aten.copy_, aten._to_copy, aten.to)
torch.utils.rename_privateuse1_backend("npu")
# What torch needs of any device, for backends that are written in Python.
torch._C._acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
torch._C._acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
NPU = torch.device("npu", 0)


class NpuTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, inside):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inside.shape,
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=NPU,
        )
        made.inside = inside
        return made

    def __repr__(self):
        return f"NpuTensor({self.inside})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator, types, given=(), named=None):
        return compute(operator, given, named or {})


class NpuMemory(TorchDispatchMode):
    """In it, tensors can be made on the device."""

    def __torch_dispatch__(self, operator, types, given=(), named=None):
        return compute(operator, given, named or {})


def compute(operator, given, named):
    tensors = [one for one in tree_flatten((given, named))[0] if isinstance(one, torch.Tensor)]
    on_npu = [one for one in tensors if isinstance(one, NpuTensor)]
    if on_npu and operator.overloadpacket not in BETWEEN_DEVICES:
        for one in tensors:
            # torch takes a number on the CPU for a number.
            if not isinstance(one, NpuTensor) and one.dim():
                raise RuntimeError(f"{operator}: tensors on npu and on {one.device}")
    device, given, named = on_cpu(operator, given, named)
    result = operator(*tree_map(unwrapped, given), **tree_map(unwrapped, named))
    if operator is aten.copy_.default:
        is_npu = isinstance(given[0], NpuTensor)
    else:
        is_npu = torch.device(device).type == "npu" if device is not None else bool(on_npu)
    if not is_npu:
        return result
    known = {id(one.inside): one for one in on_npu}
    return tree_map(lambda one: known[id(one)] if id(one) in known else wrapped(one), result)


def on_cpu(operator, given, named):
    """The device that the operator is asked for, and its arguments with the CPU in that place."""
    names = [one.name for one in operator._schema.arguments]
    if "device" in named:
        return named["device"], given, named | {"device": "cpu"}
    at = names.index("device") if "device" in names else len(given)
    if at >= len(given):
        return None, given, named
    return given[at], (*given[:at], torch.device("cpu"), *given[at + 1 :]), named


def wrapped(value):
    return NpuTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, NpuTensor) else value


def unwrapped(value):
    return value.inside if isinstance(value, NpuTensor) else value


def native(kernel):
    """An operator of the NPU, which takes nothing but tensors of the NPU."""

    def called(*given, **named):
        tensors = [one for one in tree_flatten((given, named))[0] if isinstance(one, torch.Tensor)]
        if not all(isinstance(one, NpuTensor) for one in tensors):
            raise RuntimeError(f"{kernel.__name__}: a tensor is not on the NPU")
        return tree_map(wrapped, kernel(*tree_map(unwrapped, given), **tree_map(unwrapped, named)))

    return called
