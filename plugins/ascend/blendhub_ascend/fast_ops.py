"""Chooses the operators that write and read pages, once, when the engine's pages are known."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from blendhub_ascend.chips import Chip
from blendhub_ascend.pages import Pages, as_bits
from blendhub_ascend.schemas import problem_with

log = logging.getLogger("blendhub.ascend")

Scatter: TypeAlias = Callable[..., None]
"""Called with keys and values ``[tokens, heads, width]``, both planes, and int32 slots of the tokens."""
Gather: TypeAlias = Callable[..., None]
"""Called with keys and values to fill, both planes, and int32 blocks and counts: the first tokens of each block."""

TYPES = (torch.bfloat16, torch.float16)
ALIGNED_ITEMS = 16
"""Operators of ATB want heads of whole 32 bytes."""


class FastOps(NamedTuple):
    scatter: Scatter | None
    gather: Gather | None
    reasons: tuple[str, ...]
    """The ways in which pages are written and read, and the reasons."""


def reshape_and_cache(
    keys: torch.Tensor, values: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    torch.ops.atb._npu_reshape_and_cache(
        key=keys, value=values, key_cache=key_pages, value_cache=value_pages, slot_indices=slots
    )


def scatter_pa_kv_cache(
    keys: torch.Tensor, values: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    # Its default is PA_NZ, a private format.
    torch.ops.npu.npu_scatter_pa_kv_cache(
        key=keys, value=values, key_cache=key_pages, value_cache=value_pages, slot_mapping=slots, cache_mode="Norm"
    )


def gather_pa_kv_cache(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    # seq_offset counts whole blocks only, so tokens inside a block cannot be the first ones.
    torch.ops.npu.npu_gather_pa_kv_cache(
        key_cache=key_pages,
        value_cache=value_pages,
        block_tables=blocks[:, None],
        seq_lens=counts,
        key=keys,
        value=values,
    )


OPERATORS: dict[str, Callable[..., None]] = {
    "atb::_npu_reshape_and_cache": reshape_and_cache,
    "npu::npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu::npu_gather_pa_kv_cache": gather_pa_kv_cache,
}


def offered(chip: Chip) -> list[str]:
    """The operators as known before the engine's pages are. Pages that do not fit an operator are served with torch."""
    lines = []
    for what, operator in (("written", chip.scatter), ("read", chip.gather)):
        problem = _unavailable(chip, operator)
        lines.append(f"pages are {what} with " + (f"torch: {problem}" if problem else f"{operator}, if they fit"))
    problem = problem_with("_C_ascend::swap_blocks_batch")
    return [*lines, f"copies go one by one: {problem}; vllm-ascend loads it" if problem else "copies go in batches"]


def choose(chip: Chip, pages: Pages, allowed: bool) -> FastOps:
    """Operators only if they are this chip's, as recorded, fit for these pages, and right in a trial."""
    chosen: list[Any] = []
    reasons = []
    for what, operator, trial in (("written", chip.scatter, _scatter_trial), ("read", chip.gather, _gather_trial)):
        problem = _problem(chip, operator, pages, allowed, trial)
        chosen.append(None if problem or operator is None else OPERATORS[operator])
        reasons.append(f"pages are {what} with " + (f"torch: {problem}" if problem else str(operator)))
    for reason in reasons:
        log.info("device 'npu': %s", reason)
    return FastOps(chosen[0], chosen[1], tuple(reasons))


def _problem(
    chip: Chip, operator: str | None, pages: Pages, allowed: bool, trial: Callable[[Callable[..., None], Pages], bool]
) -> str | None:
    """Why the operator is not used; None if it is."""
    if not allowed:
        return "fast_ops is false"
    problem = _unavailable(chip, operator) or _misfit(pages)
    if problem or operator is None:
        return problem
    try:
        return None if trial(OPERATORS[operator], pages) else f"{operator} moved other bytes than torch in a trial"
    except RuntimeError as error:
        return f"{operator} failed in a trial: {error}"


def _unavailable(chip: Chip, operator: str | None) -> str | None:
    if operator is None:
        return f"no operator is known to be in use on {chip.name}"
    return problem_with(operator)


def _misfit(pages: Pages) -> str | None:
    """Why operators cannot work on these pages."""
    for layer in pages.layers:
        if layer.keys.dtype not in TYPES:
            return f"operators take no {layer.keys.dtype}"
        if layer.keys.shape != layer.values.shape:
            return f"keys and values differ: {list(layer.keys.shape[1:])} and {list(layer.values.shape[1:])} a block"
        if layer.keys.shape[-1] % ALIGNED_ITEMS:
            return f"a head of {layer.keys.shape[-1]} items is not whole 32 bytes"
        if not (layer.keys.is_contiguous() and layer.values.is_contiguous()):
            return "the pages are not contiguous"
    return None


class _Scratch:
    """A few blocks of the pages' shape and place with random bits, and rows for them."""

    def __init__(self, pages: Pages) -> None:
        like = pages.layers[0].keys
        random = torch.Generator().manual_seed(1)
        self.block_size = like.shape[1]

        def bits(*shape: int) -> torch.Tensor:
            drawn = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=random)
            return drawn.view(like.dtype).to(like.device)

        self.keys, self.values = (bits(4, *like.shape[1:]) for _ in range(2))
        self.rows = [bits(2 * self.block_size, *like.shape[2:]) for _ in range(2)]

    def numbers(self, *numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(self.keys.device)


def _scatter_trial(scatter: Callable[..., None], pages: Pages) -> bool:
    scratch = _Scratch(pages)
    size = scratch.block_size
    slots = [*range(3 * size, 4 * size), *range(size // 2, size)]
    rows = [one[: len(slots)] for one in scratch.rows]
    expected = [one.cpu().clone() for one in (scratch.keys, scratch.values)]
    for plane, given in zip(expected, rows, strict=True):
        as_bits(plane).flatten(0, 1)[slots] = as_bits(given.cpu())
    scatter(*rows, scratch.keys, scratch.values, scratch.numbers(*slots))
    return _same(expected, [scratch.keys, scratch.values])


def _gather_trial(gather: Callable[..., None], pages: Pages) -> bool:
    scratch = _Scratch(pages)
    size = scratch.block_size
    slots = [*range(3 * size, 4 * size), *range((size + 1) // 2)]
    rows = [one[: len(slots)] for one in scratch.rows]
    expected = [one.cpu().flatten(0, 1)[slots] for one in (scratch.keys, scratch.values)]
    gather(*rows, scratch.keys, scratch.values, scratch.numbers(3, 0), scratch.numbers(size, (size + 1) // 2))
    return _same(expected, rows)


def _same(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    return all(torch.equal(as_bits(one), as_bits(other.cpu())) for one, other in zip(expected, found, strict=True))
