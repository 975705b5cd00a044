"""Train the reader, seeded, on two cores in less than an hour: ``python -m benchmarks.quality.reader.train``.

Prompts grow: from two short documents to ten long ones, as soon as every stratum is answered well enough.
"""

import argparse
import json
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from benchmarks.quality.reader.batches import Batch, make_batch
from benchmarks.quality.reader.begin import begin
from benchmarks.quality.reader.export import export
from benchmarks.quality.reader.forward import LEVELS, Learned, Teacher, learn
from benchmarks.quality.reader.model import Reader
from benchmarks.quality.reader.muon import Muon
from benchmarks.quality.reader.task import STRATA, Shape, make_prompt

ANY = (0, 1_000_000)
ALONE = 0.25
"""Share of steps in which every document is computed alone, as it may have been when it was stored."""
TAUGHT = 0.5
"""Weight of the teacher's loss."""
CLOSING = 2_500_000
"""Tokens of the last stage, in which the pace falls to nothing."""
KEPT = ("stage", "step", "tokens", "closing", "right", "known", "seen", "loss", "cpu")


@dataclass(frozen=True)
class Stage:
    shape: Shape
    prompts: int
    """A batch."""
    questions: int
    """A prompt."""
    passed: float = 0.85
    """Share of right answers in every stratum that ends the stage."""


STAGES = [
    Stage(Shape((2, 2), (20, 40), ANY, (1, 2), (1, 2), (0, 1), 0.3), 26, 16),
    Stage(Shape((2, 4), (25, 50), ANY, (1, 3), (1, 2), (0, 1), 0.5), 14, 20),
    Stage(Shape((4, 6), (40, 70), ANY, (2, 3), (1, 2), (0, 1), 0.6), 7, 32),
    Stage(Shape((6, 9), (60, 140), ANY, (2, 4), (1, 3), (0, 1), 0.6), 3, 48),
    Stage(Shape(), 2, 64, 2.0),
]


class Training:
    """One of the processes that train a reader together: each learns from its own prompts, all take the same steps."""

    def __init__(self, seed: int, rank: int, ranks: int) -> None:
        torch.manual_seed(seed)
        self.ranks = ranks
        self.shared, self.own = random.Random(seed), random.Random(f"{seed} {rank}")
        self.reader = Reader()
        begin(self.reader)
        self.teacher = Teacher(self.reader.sizes.hidden)
        everything = (*self.reader.parameters(), *self.teacher.parameters())
        self.parameters = [one for one in everything if one.requires_grad]
        self.optimisers = optimisers(self.reader, self.teacher)
        self.rates = [[group["lr"] for group in one.param_groups] for one in self.optimisers]
        self.right = dict.fromkeys(STRATA, 0.0)
        self.known = dict.fromkeys(LEVELS.values(), 0.0)
        self.stage = self.step = self.tokens = self.closing = 0
        self.seen = 0
        self.loss = self.cpu = 0.0

    def learn(self) -> None:
        number = self.stage if self.shared.random() < 0.85 else self.shared.randint(0, self.stage)
        alone, spread = self.shared.random() < ALONE, self.shared.random() < 0.7
        stage = STAGES[number]
        prompts = [make_prompt(self.own.getrandbits(48), "train", stage.shape) for _ in range(stage.prompts)]
        weights = [0.15 + 1 - self.right[stratum] for stratum in STRATA]
        batch = make_batch(self.own, prompts, stage.questions, weights, spread, alone)
        pace = min(1, (self.step + 1) / 30) * max(0.02, 1 - self.closing / CLOSING)
        for optimiser, rates in zip(self.optimisers, self.rates, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * pace
            optimiser.zero_grad()
        learned = learn(self.reader, self.teacher, batch, alone, TAUGHT)
        learned.loss.backward()
        seen = self._together(learned, batch)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        if number == self.stage and not alone:
            self._remember(seen, stage)

    def _together(self, learned: Learned, batch: Batch) -> list[float]:
        """Take the mean of all processes' gradients; what comes back are sums over all of them."""
        cpu = time.process_time() - self.begun
        seen = [learned.loss.detach() / self.ranks, torch.tensor(batch.tokens.numel()), torch.tensor(cpu)]
        seen += [learned.known[level] / self.ranks for level in LEVELS.values()]
        for number in range(len(STRATA)):
            there = batch.strata == number
            seen += [learned.right[there].sum(), there.sum()]
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters]
        flat = torch.cat([*(one.flatten() for one in grads), torch.stack([one.float() for one in seen])])
        dist.all_reduce(flat)
        here = 0
        for one in self.parameters:
            one.grad = (flat[here : here + one.numel()] / self.ranks).view_as(one)
            here += one.numel()
        sums = flat[here:].tolist()
        self.tokens += int(sums[1])
        self.closing += int(sums[1]) if self.stage == len(STAGES) - 1 else 0
        self.cpu = self.before + sums[2]
        return sums

    def _remember(self, seen: list[float], stage: Stage) -> None:
        self.loss += 0.04 * (seen[0] - self.loss)
        for level, share in zip(LEVELS.values(), seen[3:], strict=False):
            self.known[level] += 0.04 * (share - self.known[level])
        for stratum, right, asked in zip(STRATA, seen[6::2], seen[7::2], strict=True):
            if asked:
                self.right[stratum] += 0.04 * (right / asked - self.right[stratum])
        self.seen += 1
        passed = all(share > stage.passed - 0.35 * (name == "counting") for name, share in self.right.items())
        if passed and self.seen > 30 and self.stage < len(STAGES) - 1:
            self.stage, self.seen = self.stage + 1, 0

    def state(self) -> dict[str, Any]:
        return {
            "cpu_minutes": round(self.cpu / 60, 1), "step": self.step, "tokens": self.tokens, "stage": self.stage,
            "loss": round(self.loss, 3), "right": {name: round(share, 3) for name, share in self.right.items()},
            "known": {level: round(share, 3) for level, share in self.known.items()},
        }  # fmt: skip

    def save(self, file: Path) -> None:
        kept: dict[str, Any] = {"reader": self.reader.state_dict(), "teacher": self.teacher.state_dict()}
        kept |= {"optimisers": [one.state_dict() for one in self.optimisers]}
        kept |= {name: getattr(self, name) for name in KEPT}
        torch.save(kept, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def resume(self, file: Path) -> None:
        kept = torch.load(file)
        self.reader.load_state_dict(kept["reader"])
        self.teacher.load_state_dict(kept["teacher"])
        for one, state in zip(self.optimisers, kept["optimisers"], strict=True):
            one.load_state_dict(state)
        for name in KEPT:
            setattr(self, name, kept[name])
        self.shared.seed(f"{self.step}")
        self.own.seed(f"{self.own.random()} {self.step}")

    def start(self) -> None:
        self.begun, self.before = time.process_time(), self.cpu


def optimisers(reader: Reader, teacher: Teacher) -> list[torch.optim.Optimizer]:
    matrices, gains, rest = [], [], [*teacher.parameters()]
    for name, parameter in reader.named_parameters():
        if not parameter.requires_grad:
            continue
        if "q_norm" in name:
            gains.append(parameter)
        elif parameter.dim() == 2 and "embed" not in name and "lm_head" not in name:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": gains, "lr": 8e-3}]
    return [Muon(matrices), torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)]


def work(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{options.out.resolve()}/meeting", rank=rank, world_size=options.ranks)
    training = Training(options.seed, rank, options.ranks)
    if options.resume:
        training.resume(options.resume)
    training.start()
    while training.closing < CLOSING:
        training.learn()
        if rank == 0 and training.step % 20 == 0:
            log(options.out, training.state())
        if rank == 0 and training.step % 100 == 0:
            training.save(options.out / "training.pt")
    if rank == 0:
        training.save(options.out / "training.pt")
        export(training.reader, options.out / "checkpoint", torch.float16)
        shutil.copy(options.out / "training.log", options.out / "checkpoint")


def log(out: Path, state: dict[str, Any]) -> None:
    line = json.dumps(state)
    print(line, flush=True)
    with (out / "training.log").open("a") as file:
        file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, help="processes that train together, one core each")
    parser.add_argument("--resume", type=Path, help="a training.pt to go on from")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "meeting").unlink(missing_ok=True)
    spawn(work, (options,), options.ranks)


if __name__ == "__main__":
    main()
