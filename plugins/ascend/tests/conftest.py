"""Without an NPU, strict operators of the recorded schemas stand in for those of torch_npu."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import strict_ops
from npu_stand_ins import HAS_NPU

if not HAS_NPU:
    strict_ops.define()
