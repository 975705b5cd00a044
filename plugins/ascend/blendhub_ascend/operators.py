"""Chooses the operators that write and read pages, once, when the engine's pages are known.

``schemas.json`` has the operators as the wheels of torch_npu and vllm-ascend declare them.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from blendhub.core.errors import Unsupported
from blendhub.devices import Planes

log = logging.getLogger("blendhub.ascend")

SCHEMAS: dict[str, str] = json.loads(Path(__file__).with_name("schemas.json").read_text())["schemas"]
COPY_MANY = "_C_ascend::swap_blocks_batch"
TYPES = (torch.bfloat16, torch.float16)
ALIGNED_ITEMS = 16
"""Operators of ATB want heads of whole 32 bytes."""


class Chip(NamedTuple):
    """The operators that vllm-ascend uses on an NPU. One that a chip lacks can end the process: none is tried."""

    scatter: str | None
    """The operator that writes keys and values to pages."""
    gather: str | None
    """The operator that reads them."""


CHIPS = {
    # Atlas A2 (Ascend 910B), Atlas A3, and A5 (Ascend 950).
    range(220, 226): Chip("atb::_npu_reshape_and_cache", None),
    range(250, 256): Chip("atb::_npu_reshape_and_cache", None),
    range(260, 261): Chip("npu::npu_scatter_pa_kv_cache", "npu::npu_gather_pa_kv_cache"),
}
"""By the numbers that ``torch_npu.npu.get_soc_version()`` returns."""


class Operators(NamedTuple):
    """None: torch copies block by block."""

    scatter: Callable[..., None] | None
    """Called with keys and values ``[tokens, heads, width]``, both planes, and int32 slots of the tokens."""
    gather: Callable[..., None] | None
    """Called with keys and values to fill, both planes, int32 blocks ``[n, 1]``, and the first tokens of each."""


def chip_of(soc_version: int) -> Chip:
    """Raises Unsupported for a 310P. NPUs without a name here are served with torch alone."""
    if 200 <= soc_version <= 205:
        raise Unsupported(
            "device 'npu' does not support the 310P, whose KV is in a private format (NZ); "
            "serve without BlendHub there: leave out --kv-transfer-config"
        )
    return next((chip for numbers, chip in CHIPS.items() if soc_version in numbers), Chip(None, None))


def problem_with(operator: str | None) -> str | None:
    """Why the running torch does not have the operator as it was recorded; None if it has."""
    if operator is None:
        return "no operator is known to be in use on this NPU"
    namespace, name = operator.split("::")
    try:
        running = str(getattr(getattr(torch.ops, namespace), name).default._schema)
    except AttributeError:
        return f"{operator} is not loaded here"
    recorded = str(torch._C.parse_schema(SCHEMAS[operator]))
    if running != recorded:
        return f"{operator} has another schema here, {running}, than the recorded {recorded}"
    return None


def offered(chip: Chip) -> Iterator[str]:
    """The operators as known before the engine's pages are. Pages that do not fit an operator are served with torch."""
    for what, operator in (("written", chip.scatter), ("read", chip.gather)):
        problem = problem_with(operator)
        yield f"pages are {what} with " + (f"torch: {problem}" if problem else f"{operator}, if they fit")
    problem = problem_with(COPY_MANY)
    yield f"copies go one by one: {problem}; vllm-ascend loads it" if problem else "copies go in batches"


def choose(chip: Chip, layers: Sequence[Planes], allowed: bool) -> Operators:
    """Operators only if they are this chip's, as recorded, fit for these pages, and right in a trial."""
    chosen = []
    for what, operator in (("written", chip.scatter), ("read", chip.gather)):
        problem = _problem(chip, operator, layers) if allowed else "fast_ops is false"
        chosen.append(None if problem or operator is None else OPERATORS[operator])
        log.info("device 'npu': pages are %s with %s", what, f"torch: {problem}" if problem else operator)
    return Operators(*chosen)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's items as integers of their size, so that no conversion can change the bits of a NaN."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def _problem(chip: Chip, operator: str | None, layers: Sequence[Planes]) -> str | None:
    """Why the operator is not used; None if it is."""
    problem = problem_with(operator) or next(filter(None, map(_misfit, layers)), None)
    if problem or operator is None:
        return problem
    try:
        if _moves_the_right_bytes(operator, operator == chip.scatter, layers[0].keys):
            return None
    except RuntimeError as error:
        return f"{operator} failed in a trial: {error}"
    return f"{operator} moved other bytes than torch in a trial"


def _misfit(layer: Planes) -> str | None:
    """Why operators cannot work on these pages."""
    if layer.keys.dtype not in TYPES:
        return f"operators take no {layer.keys.dtype}"
    if layer.keys.shape != layer.values.shape:
        return f"keys and values differ: {list(layer.keys.shape[1:])} and {list(layer.values.shape[1:])} a block"
    if layer.keys.shape[-1] % ALIGNED_ITEMS:
        return f"a head of {layer.keys.shape[-1]} items is not whole 32 bytes"
    if not (layer.keys.is_contiguous() and layer.values.is_contiguous()):
        return "the pages are not contiguous"
    return None


def _moves_the_right_bytes(operator: str, writes: bool, like: torch.Tensor) -> bool:
    """Try the operator on four blocks of the pages' shape and place, with random bits: a whole block and half of one.

    A written half is the second one of its block; only whole blocks and their beginnings are read.
    """
    random, size = torch.Generator().manual_seed(1), like.shape[1]

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=random).view(like.dtype)

    half = range(size // 2, size) if writes else range((size + 1) // 2)
    slots = [*range(3 * size, 4 * size), *half]
    pages, rows = ([bits(*shape, *like.shape[2:]) for _ in range(2)] for shape in ((4, size), (len(slots),)))
    there, staged = ([tensor.to(like.device, copy=True) for tensor in tensors] for tensors in (pages, rows))
    numbers = [slots] if writes else [[[3], [0]], [size, len(half)]]
    OPERATORS[operator](*staged, *there, *(torch.tensor(some, dtype=torch.int32).to(like.device) for some in numbers))
    for plane, row in zip(pages, rows, strict=True):
        places = as_bits(plane).flatten(0, 1)
        if writes:
            places[slots] = as_bits(row)
        else:
            as_bits(row).copy_(places[slots])
    expected, moved = ([*pages, *rows], [*there, *staged])
    return all(torch.equal(as_bits(one), as_bits(other.cpu())) for one, other in zip(expected, moved, strict=True))


def _with(operator: str, *numbers: str, **options: str) -> Callable[..., None]:
    """Calls the operator with keys and values, both planes, numbers under these names, and options."""
    namespace, name = operator.split("::")

    def call(keys: torch.Tensor, values: torch.Tensor, *rest: torch.Tensor) -> None:
        names = "key_cache", "value_cache", *numbers
        given = dict(zip(names, rest, strict=True))
        getattr(getattr(torch.ops, namespace), name)(key=keys, value=values, **given, **options)

    return call


OPERATORS: dict[str, Callable[..., None]] = {
    "atb::_npu_reshape_and_cache": _with("atb::_npu_reshape_and_cache", "slot_indices"),
    # Its default is PA_NZ, a private format.
    "npu::npu_scatter_pa_kv_cache": _with("npu::npu_scatter_pa_kv_cache", "slot_mapping", cache_mode="Norm"),
    # Its seq_offset counts whole blocks only, so tokens inside a block cannot be the first ones.
    "npu::npu_gather_pa_kv_cache": _with("npu::npu_gather_pa_kv_cache", "block_tables", "seq_lens"),
}
