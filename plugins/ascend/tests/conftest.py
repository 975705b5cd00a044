"""Without an NPU, strict operators of the recorded schemas stand in for those of torch_npu."""

from plugins.ascend.tests import strict_ops
from plugins.ascend.tests.npu_stand_ins import HAS_NPU

if not HAS_NPU:
    strict_ops.define()
