"""The moment before the runner samples: its predictions may still be replaced. vLLM has no interface for it.

Both runners call their sampler outside of graphs, once a step, behind the masks of structured output and before
everything else that a request asks for.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from blendhub.core.errors import Unsupported


class Sampling(ABC):
    """The predictions of a step: a row for each of its requests."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        """The runner samples from this tensor, and takes from it the log-probabilities that a client sees. ``look`` may
        change it in place."""

    @abstractmethod
    def rows(self, requests: Sequence[str]) -> list[int | None]:
        """The row of each request; None for a request that the step does not compute."""

    @abstractmethod
    def last_tokens(self, rows: Sequence[int]) -> list[int]:
        """The ids of the tokens behind which these rows predict. Waits for the device."""

    @abstractmethod
    def processed(self) -> torch.Tensor:
        """The predictions behind penalties, biases and vLLM's other processors, as they will be sampled.

        Processors of others are left out: they may count how often they are called.
        """


Look = Callable[[Sampling], None]


class SamplingOfV1(Sampling):
    def __init__(self, runner: Any, logits: torch.Tensor, metadata: Any) -> None:
        super().__init__(logits)
        self._runner = runner
        self._metadata = metadata

    def rows(self, requests: Sequence[str]) -> list[int | None]:
        numbers: dict[str, int] = self._runner.input_batch.req_id_to_index
        return [numbers.get(name) for name in requests]

    def last_tokens(self, rows: Sequence[int]) -> list[int]:
        ends = self._runner.query_start_loc.np[np.asarray(rows) + 1]
        ids = self._runner.input_ids.gpu
        tokens: list[int] = ids[torch.from_numpy(ends - 1).to(ids.device, torch.int64)].tolist()
        return tokens

    def processed(self) -> torch.Tensor:
        logits = self.logits.to(torch.float32, copy=True)
        of_vllm = type(self._metadata.logitsprocs)(filter(_is_of_vllm, self._metadata.logitsprocs.all))
        metadata = dataclasses.replace(self._metadata, logitsprocs=of_vllm)
        processed: torch.Tensor = self._runner.sampler.apply_logits_processors(logits, metadata, False)
        return processed


class SamplingOfV2(Sampling):
    def __init__(self, runner: Any, arguments: dict[str, Any]) -> None:
        super().__init__(arguments["logits"])
        self._runner = runner
        self._arguments = arguments

    def rows(self, requests: Sequence[str]) -> list[int | None]:
        numbers: dict[str, int] = self._runner.req_states.req_id_to_index
        rows = {int(number): row for row, number in enumerate(self._arguments["idx_mapping_np"])}
        return [rows.get(numbers[name]) if name in numbers else None for name in requests]

    def last_tokens(self, rows: Sequence[int]) -> list[int]:
        ids: list[int] = self._arguments["input_ids"].tolist()
        return [ids[row] for row in rows]

    def processed(self) -> torch.Tensor:
        sampler = self._runner.sampler
        processors = sampler.logits_processors
        sampler.logits_processors = [*filter(_is_of_vllm, processors)]
        try:
            processed: torch.Tensor = sampler.apply_sampling_params(**self._arguments, skip_top_k_top_p=True)
        finally:
            sampler.logits_processors = processors
        return processed


OF_V2 = ("logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids", "expanded_local_pos",
         "seq_lens_upper_bound_np")  # fmt: skip
"""The arguments of the sampler's ``sample`` that its ``apply_sampling_params`` takes, too."""


def watch_sampling(runner: Any, look: Look) -> None:
    """Have ``look`` called before each step is sampled. Raises Unsupported where a token cannot be held."""
    if getattr(runner, "speculative_config", None):
        raise Unsupported("vLLM speculates, and accepts several tokens in a step")
    if getattr(runner, "batch_sharder", None):
        raise Unsupported("vLLM samples a part of the requests on each rank (enable_batch_sharded_sampling)")
    sampler = getattr(runner, "sampler", None)
    if isinstance(sampler, torch.nn.Module):
        _need(runner, "input_batch", "query_start_loc.np", "input_ids.gpu", "sampler.apply_logits_processors")

        def before_forward(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = dict(zip(("logits", "sampling_metadata"), arguments, strict=False)) | named
            look(SamplingOfV1(runner, given["logits"], given["sampling_metadata"]))

        sampler.register_forward_pre_hook(before_forward, with_kwargs=True)
        return
    paths = ("sampler.sample", "sampler.apply_sampling_params", "sampler.logits_processors")
    _need(runner, "req_states.req_id_to_index", *paths)
    assert sampler
    sample = sampler.sample

    def look_and_sample(*arguments: Any, **named: Any) -> Any:
        given = dict(zip(OF_V2, arguments, strict=False)) | named
        look(SamplingOfV2(runner, {name: given[name] for name in OF_V2}))
        return sample(*arguments, **named)

    sampler.sample = look_and_sample


def _is_of_vllm(processor: Any) -> bool:
    return type(processor).__module__.startswith("vllm.")


def _need(runner: Any, *paths: str) -> None:
    for path in paths:
        owner = runner
        for name in path.split("."):
            owner = getattr(owner, name, None)
        if owner is None:
            raise Unsupported(f"vLLM's {type(runner).__name__} has no {path}")
