"""vLLM's sampler without the function that it compiles to machine code, for 20 s of a core in each engine's process."""

from vllm.v1.sample import sampler


def arrange() -> None:
    """Only the sampler: the model is compiled as everywhere."""
    sampler.batched_count_greater_than = sampler.batched_count_greater_than._torchdynamo_orig_callable
