"""Lets all questions to one prompt share its blended KV, in an engine that serves nothing but this benchmark.

BlendHub keeps blended KV out of vLLM's prefix cache, because another request would get it as exact. Here the questions
to a prompt are to get just that: what is measured are answers behind one blend, and blending again for each of thirty
questions would give the same KV. The benchmark empties the cache before each blend.
"""

from blendhub.vllm.scheduler import connector_scheduler


def arrange() -> None:
    """Call this in the engine's process, before there is an engine."""
    vars(connector_scheduler)["salt_block_hashes"] = lambda request, first_approximate, hash_block_size: None
