"""Compares predictions: what the model says behind a prompt from blended KV and from exact KV."""

import numpy as np
import torch

from blendhub.core.errors import Unsupported
from blendhub.core.spans import Span
from blendhub.vllm.model.checks.parts_check import trial_part
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.recompute_set import RecomputeSet

MAX_KL = 1e3
"""The divergence of predictions that cannot be compared: with NaNs, or with a token that one of them rules out."""


def compared(blended: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Two numbers on the device from the logits of one token: whether the likeliest is the same, and the divergence."""
    with torch.inference_mode():
        guess, truth = (torch.log_softmax(logits.float(), 0) for logits in (blended, exact))
        # A token that the truth rules out adds nothing.
        terms = torch.where(truth.isneginf(), 0.0, truth.exp() * (truth - guess))
        kl = terms.sum().nan_to_num(MAX_KL, MAX_KL).clamp(0, MAX_KL)
        return torch.stack([(blended.argmax() == exact.argmax()).to(kl.dtype), kl])


def check_predictions(model: EngineModel) -> None:
    """Raise unless the model predicts a token behind chosen ones, as audits need it. All ranks call it together."""
    part = trial_part(model, np.arange(4, dtype=np.uint32), [Span(0, min(4, *model.block_sizes))])
    hidden = model.forward(RecomputeSet([part]))
    if not isinstance(hidden, torch.Tensor):
        raise Unsupported(f"its forward returns a {type(hidden).__name__}, not hidden states alone")
    predicted = model.logits(hidden[:1])
    if predicted is not None and (predicted.ndim != 2 or len(predicted) != 1):
        raise Unsupported(f"its predictions have the shape {tuple(predicted.shape)}, not one row for each token")
