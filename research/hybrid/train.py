"""Trains the model: ``nice -n 19 python -m research.hybrid.train [--minutes 55]``, on one core."""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from research.hybrid.model import Model, Piece
from research.hybrid.task import LEVELS, PAD, WORDS, batch

WEIGHTS = Path("build/hybrid.pt")
MASTERED = 0.8
"""The share of right values from which on prompts become harder."""
ASKED = 12
TOKENS = 1_800
"""About so many tokens a step."""
WARM_UP, COOLING, DECAY, SAVED_EVERY = 40, 0.8, 0.02, 100


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal. Torch's own computes in bfloat16, which old processors emulate."""

    def __init__(self, matrices: list[Tensor], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                update = orthogonal(p.grad.lerp(momentum, 0.95))
                p.mul_(1 - group["lr"] * DECAY).sub_(update, alpha=group["lr"] * 0.2 * max(p.shape) ** 0.5)


def orthogonal(x: Tensor) -> Tensor:
    """Nearly: five steps of Newton and Schulz bring all singular values near 1."""
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x.mT if tall else x


def optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """Muon for matrices, which learns retrieval in fewer steps, and AdamW for what is none or borders on words."""
    matrices = [p for name, p in model.blocks.named_parameters() if p.ndim == 2 and "gates" not in name]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        Muon(matrices, lr=3e-3),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0),
    ]


def drawn(rng: random.Random, level: int) -> tuple[Tensor, Tensor]:
    """Mostly of this level, at times of an easier one."""
    if rng.random() < 0.15:
        level = rng.randint(0, level)
    hard = LEVELS[level]
    document = max(sum(hard.length) / 2, 6 + 3 * sum(hard.facts))
    usual = sum(hard.documents) / 2 * document + 9 * min(ASKED, sum(hard.documents) * sum(hard.facts) // 4) + 16
    tokens, wanted = batch(rng, LEVELS[level], max(4, round(TOKENS / usual)), ASKED)
    return torch.tensor(tokens), torch.tensor(wanted)


def train(minutes: float, begun: Path | None) -> Iterator[str]:
    torch.manual_seed(0)
    rng = random.Random("hybrid training")
    model = Model(WORDS)
    if begun:
        model.load_state_dict(torch.load(begun))
    using = optimizers(model)
    rates = [group["lr"] for each in using for group in each.param_groups]
    level, step, right, titles, began = (len(LEVELS) - 1) * bool(begun), 0, 0.0, 0.0, time.monotonic()
    while (passed := (time.monotonic() - began) / 60 / minutes) < 1:
        rate = min(1, (step + 1) / WARM_UP, (1 - passed) / COOLING)
        for each, lr in zip(using, rates, strict=True):
            each.param_groups[0]["lr"] = lr * rate
        tokens, wanted = drawn(rng, level)
        logits, _ = model(Piece(tokens))
        asked = wanted != PAD
        loss = F.cross_entropy(logits[asked], wanted[asked])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        for each in using:
            each.step()
            each.zero_grad()
        step += 1
        is_right = (logits[asked].argmax(-1) == wanted[asked]).view(-1, 4)
        titles += 0.1 * (float(is_right.all(-1).float().mean()) - titles)
        right += 0.1 * (float(is_right[:, :2].all(-1).float().mean()) - right)
        if step % 10 == 0:
            known = f"right {right:.3f}, with titles {titles:.3f}"
            yield f"{60 * passed * minutes:5.0f} s, step {step}, level {level}: loss {loss:.3f}, {known}"
        if right > MASTERED and level + 1 < len(LEVELS):
            level, right = level + 1, 0.0
        if step % SAVED_EVERY == 0:
            torch.save(model.state_dict(), WEIGHTS)
    torch.save(model.state_dict(), WEIGHTS)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=55)
    options.add_argument("--begun", type=Path, metavar="FILE", help="go on with these weights, at the hardest level")
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    WEIGHTS.parent.mkdir(exist_ok=True)
    for line in train(given.minutes, given.begun):
        print(line, flush=True)


if __name__ == "__main__":
    main()
