"""The operators that vllm-ascend uses on each NPU. One that a chip lacks can end the process: none is tried."""

from typing import NamedTuple

from blendhub.core.errors import Unsupported


class Chip(NamedTuple):
    name: str
    first: int
    last: int
    """The numbers that ``torch_npu.npu.get_soc_version()`` returns for it."""
    scatter: str | None
    """The operator that writes keys and values to pages."""
    gather: str | None
    """The operator that reads them."""


CHIPS = (
    Chip("Atlas A2 (Ascend 910B)", 220, 225, "atb::_npu_reshape_and_cache", None),
    Chip("Atlas A3", 250, 255, "atb::_npu_reshape_and_cache", None),
    Chip("A5 (Ascend 950)", 260, 260, "npu::npu_scatter_pa_kv_cache", "npu::npu_gather_pa_kv_cache"),
)


def chip_of(soc_version: int) -> Chip:
    """Raises Unsupported for a 310P. NPUs without a name here are served with torch alone."""
    if 200 <= soc_version <= 205:
        raise Unsupported(
            "device 'npu' does not support the 310P, whose KV is in a private format (NZ); "
            "serve without BlendHub there: leave out --kv-transfer-config"
        )
    for chip in CHIPS:
        if chip.first <= soc_version <= chip.last:
            return chip
    return Chip(f"the NPU with SoC version {soc_version}", soc_version, soc_version, None, None)
