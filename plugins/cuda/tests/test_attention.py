"""The kernel of attention for chosen tokens, beyond what the conformance suite asks."""

from contextlib import closing

import pytest
import torch
from blendhub_cuda import CudaOptions
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.runtime import CudaRuntime
from msgspec.structs import replace

from blendhub.contracts import AttentionRules
from blendhub.core.errors import Unsupported
from blendhub.testing.devices.attending import LATENT, LAYOUT, RULES, AttentionPages, check_attention, spread_out
from blendhub.testing.devices.deferred import DeferredRuntime

HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.slow


def check(chosen, rules, pages, dtype=torch.float32):
    runtime, place = (CudaRuntime, "cuda") if HAS_GPU else (lambda place: DeferredRuntime(), "cpu")
    with closing(CudaDevice(CudaOptions(), runtime)) as device:
        check_attention(device, place, chosen, rules, pages, dtype)


@pytest.mark.parametrize("group, width, value_width", [(1, 64, 32), (3, 96, 96), (4, 128, 128), (16, 96, 64)])
def test_heads_share_keys_and_values_may_be_narrower(group, width, value_width):
    pages = AttentionPages(replace(LAYOUT, key_dim=width, value_dim=value_width), block_size=128)
    check([spread_out(20, 130)], AttentionRules(2 * group, 0.2), pages)


# Triton's interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize("dtype", ["float16", *(["bfloat16"] if HAS_GPU else [])])
def test_half_precision(dtype):
    check([spread_out(40, 150)], RULES, AttentionPages(replace(LAYOUT, dtype=dtype)), getattr(torch, dtype))


def test_a_latent_may_have_more_heads_than_a_tile_has_rows_and_is_refused_where_it_has_no_kernel():
    check([spread_out(3, 70)], AttentionRules(130, 0.04, latent=512), AttentionPages(LATENT, "latent"))
    with pytest.raises(Unsupported, match="no kernel for values of 448 items of 576"):
        check([[0]], AttentionRules(16, 0.04, latent=448), AttentionPages(LATENT, "latent"))
