"""How many tokens a step recomputes beside those that vLLM schedules, and how long blending a prompt takes by that."""

import math
from typing import NamedTuple

from blendhub.vllm.settings import Settings


class Pace(NamedTuple):
    """The speed of the coming steps. vLLM computes a prompt whose turn it is with nearly all of a step's budget."""

    engine: int
    """The tokens that vLLM computes in a step."""
    beside: int
    """The tokens that are recomputed in a step that vLLM fills."""
    alone: int
    """The tokens that are recomputed in a step that vLLM leaves empty."""
    full_steps: int
    """The number of steps that vLLM fills with the prompts of other requests."""

    def steps_to_compute(self, n_tokens: int) -> int:
        """How many steps vLLM takes for so many tokens of a prompt."""
        return -(-n_tokens // self.engine)

    def steps_to_recompute(self, n_tokens: int) -> int:
        """How many steps it takes to recompute so many tokens of a prompt."""
        behind = n_tokens - self.full_steps * self.beside
        if behind <= 0:
            return -(-n_tokens // self.beside)
        return self.full_steps + -(-behind // self.alone)


class StepBudget:
    def __init__(self, settings: Settings, engine_tokens: int) -> None:
        """``engine_tokens``: vLLM's token budget of a step."""
        self._engine = engine_tokens
        self._least = math.ceil(settings.min_blend_share * engine_tokens)
        self._most = settings.blend_tokens_per_step or engine_tokens

    def of_step(self, scheduled: int) -> int:
        """How many tokens may be recomputed in a step in which vLLM computes so many."""
        return min(max(self._engine - scheduled, self._least), self._most)

    def pace(self, waiting: int) -> Pace:
        """The pace while vLLM has to compute so many tokens of other prompts."""
        beside, alone = self.of_step(self._engine), self.of_step(0)
        return Pace(self._engine, beside, alone, waiting // self._engine)
