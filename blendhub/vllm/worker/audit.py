"""Compares the predictions of an audit: the beginning of an answer from blended KV and from exact KV."""

import numpy as np
import torch

from blendhub.core.errors import Unsupported
from blendhub.core.spans import Span, gaps
from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.decision import Decision
from blendhub.vllm.model.checks.parts_check import trial_part
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.recompute_set import RecomputeSet

MOST_KL = 1e3
"""The divergence of predictions that cannot be compared: with NaNs, or with a token that one of them rules out."""


def inexact(decision: Decision, n_tokens: int) -> list[Span]:
    """The inexact spans of a blended prompt: all from the first approximate token on, except later exact matches."""
    return list(gaps(Span(decision.first_approximate or 0, n_tokens), decision.exact))


def compare(blended: torch.Tensor, exact: torch.Tensor) -> AuditOutcome:
    """The outcome of an audit, from the logits of each token, both behind the same tokens. Waits for the device."""
    with torch.inference_mode():
        guess, truth = (torch.log_softmax(rows[0].float(), 0) for rows in (blended, exact))
        # A token that the truth rules out adds nothing.
        terms = torch.where(truth.isneginf(), 0.0, truth.exp() * (truth - guess))
        kl = terms.sum().nan_to_num(MOST_KL, MOST_KL).clamp(0, MOST_KL)
        agreed = (blended.argmax(1) == exact.argmax(1)).cumprod(0).sum()
        n_agreed, divergence = torch.stack([agreed.to(kl.dtype), kl]).tolist()
    n = len(exact)
    return AuditOutcome(agrees=n_agreed == n, kl=divergence, tokens=n, agreed_tokens=int(n_agreed))


def check_predictions(model: EngineModel) -> None:
    """Raise unless the model predicts a token behind chosen ones, as audits need it. All ranks call it together."""
    part = trial_part(model, np.arange(4, dtype=np.uint32), [Span(0, min(4, *model.block_sizes))])
    hidden = model.forward(RecomputeSet([part]))
    if not isinstance(hidden, torch.Tensor):
        raise Unsupported(f"its forward returns a {type(hidden).__name__}, not hidden states alone")
    predicted = model.logits(hidden[:1])
    if predicted is not None and (predicted.ndim != 2 or len(predicted) != 1):
        raise Unsupported(f"its predictions have the shape {tuple(predicted.shape)}, not one row for each token")
