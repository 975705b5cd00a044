"""Whether small forwards replay vLLM's CUDA graphs: tried on the loaded model."""

import logging

from blendhub.core.errors import Unsupported
from blendhub.core.spans import Span
from blendhub.vllm.model.checks.parts_check import trial_part, trial_tokens
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.page_trial import error_of
from blendhub.vllm.model.recompute_set import RecomputeSet
from blendhub.vllm.ranks import Ranks

log = logging.getLogger(__name__)


def choose_graphs(model: EngineModel, allowed: float, ranks: Ranks) -> None:
    """Have small forwards replay graphs, if vLLM has some and they compute the same, and say in the log which do.

    ``allowed``: how far hidden states may be off, relative to the largest.
    """
    try:
        most = ranks.together(model.find_graphs)
        ranks.together(lambda: _check(model, allowed))
    except Exception as error:
        model.graphs = None
        if model.device.type != "cpu":  # where nothing has graphs
            log.info("no forward of chosen tokens replays CUDA graphs, because %s", error)
        return
    log.info("forwards of at most %d chosen tokens replay CUDA graphs", most)


def _check(model: EngineModel, allowed: float) -> None:
    tokens = trial_tokens(model)
    chosen = RecomputeSet([trial_part(model, tokens, [Span(0, len(tokens))])])
    expected = model.forward(chosen, replays=False).clone()
    if (error := error_of(model.forward(chosen), expected)) > allowed:
        raise Unsupported(f"what the model computes with them is off by {error:.1%} (allowed {allowed:.1%})")
