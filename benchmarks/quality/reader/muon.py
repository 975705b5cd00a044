"""Muon: steps along the orthogonalised momentum of matrices; small models learn several times sooner than with Adam."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    def __init__(
        self, parameters: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike = defaultdict(list)
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(mean, group["momentum"])
                tall = update.shape[0] > update.shape[1]
                update = update.T if tall else update
                alike[update.shape].append((parameter, update, tall))
            for members in alike.values():
                steps = orthogonal(torch.stack([update for _, update, _ in members]))
                for (parameter, _, tall), one in zip(members, steps, strict=True):
                    stretch = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(one.T if tall else one, alpha=-group["lr"] * stretch)


def orthogonal(x: Tensor) -> Tensor:
    """Matrices with the same directions and singular values near 1: five steps of Newton and Schulz."""
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.float()
