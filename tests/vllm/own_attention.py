"""Engines on the CPU whose chosen tokens attend by the device: in plain torch, or by the kernel in its interpreter."""

import math
from typing import Any

from blendhub_cpu.device import CpuDevice

from blendhub.contracts import ChosenAttention
from blendhub.devices import read_pages
from blendhub.testing.attention_reference import ReferenceAttention
from blendhub.vllm.worker import attention_choice


def arrange(kernel: str = "", *stand_ins: str) -> None:
    """In an engine's process. ``stand_ins``: how ``gpu_stand_ins`` put vLLM's own code for GPUs in place."""
    if stand_ins:
        from tests.vllm.gpu_stand_ins import put_in_place

        put_in_place(*stand_ins)
    attach = CpuDevice.attach

    def attach_and_remember(self: Any, *given: Any) -> None:
        attach(self, *given)
        self.given = given

    def attention(self: Any, rules: Any, dtype: Any) -> ChosenAttention:
        layers, block_size, layout = self.given
        if not kernel:
            return ReferenceAttention(layers, block_size, layout, rules)
        from blendhub_cuda.attention import CudaAttention

        return CudaAttention(read_pages(layers, block_size, layout), layout, rules, dtype)

    CpuDevice.attach, CpuDevice.attention = attach_and_remember, attention
    attention_choice.is_faster, attention_choice.SECONDS = lambda ours, theirs: True, math.inf
    if kernel:  # a few tokens, because both ways take seconds in the interpreter
        attention_choice.PROMPT_TOKENS, attention_choice.CHOSEN_TOKENS, attention_choice.LENGTHS = 64, 8, (1, 4)


def arrange_for_short_spans() -> None:
    """The device attends for spans of up to 4 tokens; the engine's attention serves longer ones."""
    arrange()
    attention_choice.longest_attended = lambda ours, theirs: 4
