"""All names of torch that the code uses are in torch 2.10, which vllm-ascend needs; the tests run with another one."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "record_torch_names.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("record_torch_names", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_code_uses_no_name_of_torch_that_torch_2_10_lacks(script):
    recorded, used = json.loads(script.TARGET.read_text()), script.used()
    assert recorded["torch"] == "2.10.0" and len(used) > 50
    assert not used & set(recorded["lacks"])
    unknown = {name for name in used if script.is_deep(name)} - set(recorded["has"])
    assert not unknown, f"whether torch 2.10 has these names is not known: run {SCRIPT.name}"


def test_names_of_torch_are_found_in_code(script):
    code = """
from torch.utils import dlpack
def move(given, torch_npu):
    torch.ops.npu.get_npu_format(given)
    return torch.stack([given]).index_copy_(0, given.T, torch.nn.functional.pad).name_of_no_tensor
"""
    assert set(script._names_in(script.ast.parse(code))) == {
        "torch.utils.dlpack",
        "torch.ops",
        "torch.stack",
        "torch.Tensor.index_copy_",
        "torch.Tensor.T",
        "torch.nn.functional.pad",
    }
