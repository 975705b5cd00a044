"""Looks for the prefix with the greedy coordinate gradient, in plain torch."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks.quality.workloads import Chat
from research.hijack.prompts import HOSTILE, PADDING, PREFIX, TRAINING, Prompts, Victim, prefix

KV: TypeAlias = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, ``[prompts, heads, tokens, width]``."""
GUESSED, CANDIDATES, JOINED, LIKELY, SWAPS = 3, 24, 6, 32, 6


class Service:
    """The victims' model, which moves the document's KV into their prompts."""

    def __init__(self, model: Path, prompts: Prompts, victims: Sequence[Victim], dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).requires_grad_(False)
        self._model = loaded.model
        self.words: Tensor = loaded.lm_head.weight
        """The embeddings of all words, before the first layer and behind the last one."""
        self._document = self.words[prompts.document]
        self._heads = [self.compute(self.words[victim.head][None])[0] for victim in victims]
        self._tails = [self.words[victim.tail] for victim in victims]

    def compute(self, embedded: Tensor, before: KV | None = None) -> tuple[KV, Tensor]:
        """The KV before these tokens with theirs, and what the last layer says at the last of them."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        n = len(embedded)
        for layer, (keys, values) in enumerate(before or ()):
            cache.update(keys.expand(n, -1, -1, -1), values.expand(n, -1, -1, -1), layer)
        said = self._model(inputs_embeds=embedded, past_key_values=cache).last_hidden_state[:, -1]
        return [(layer.keys, layer.values) for layer in cache.layers], said

    def donor(self, context: Tensor, before: KV | None = None) -> KV:
        """The document's KV, computed behind this context."""
        embedded = torch.cat([context, self._document.expand(len(context), -1, -1)], 1)
        begin = -len(self._document)
        return [(keys[:, :, begin:], values[:, :, begin:]) for keys, values in self.compute(embedded, before)[0]]

    def answers(self, donor: KV) -> Tensor:
        """``[victims, prompts, words]``: log-probabilities of the next word of each victim's prompt."""
        n, answers = len(donor[0][0]), []
        for head, tail in zip(self._heads, self._tails, strict=True):
            further = head[0][0].shape[2] - PADDING - HOSTILE
            angle = torch.cat([further * self._model.rotary_emb.inv_freq.float()] * 2)
            before = []
            for (head_keys, head_values), (keys, values) in zip(head, donor, strict=True):
                left, right = keys.float().chunk(2, -1)
                turned = keys * angle.cos() + torch.cat([-right, left], -1) * angle.sin()
                keys = torch.cat([head_keys.expand(n, -1, -1, -1), turned.to(keys.dtype)], 2)
                before.append((keys, torch.cat([head_values.expand(n, -1, -1, -1), values], 2)))
            answers.append(self.compute(tail.expand(n, -1, -1), before)[1] @ self.words.T)
        return torch.stack(answers).float().log_softmax(-1)


class Attack:
    """The attacker has the victims' model, and guesses how they ask."""

    def __init__(self, model: Path, prompts: Prompts, chat: Chat) -> None:
        # In bfloat16 it takes half the time.
        self._service = Service(model, prompts, prompts.victims(GUESSED, TRAINING), torch.bfloat16)
        self._words = self._service.words
        self._padding, _ = self._service.compute(self._words[prompts.context(0, [])][None])
        self._target = prompts.target
        self._start = torch.tensor(prefix())
        self._random = torch.Generator().manual_seed(1)

    def optimise(self, seconds: float, file: Path = PREFIX) -> None:
        """Write the best tokens to the file, again and again."""
        tokens, swaps, begun = self._start, SWAPS, time.monotonic()
        while (taken := time.monotonic() - begun) < seconds:
            candidates = self._candidates(tokens, swaps)
            # The swaps of several good ones together are mostly better than those of the best one.
            joined = [tokens]
            for candidate in candidates[self._losses(candidates).argsort()[:JOINED]]:
                joined.append(joined[-1].where(joined[-1] != tokens, candidate))
            losses = self._losses(torch.stack(joined))
            best = int(losses.argmin())
            tokens, swaps = joined[best], max(1, swaps - (best == 0))
            file.write_text(json.dumps(tokens.tolist()) + "\n")
            print(
                f"after {taken:.0f} of {seconds} s: -log p(target) is {losses[best]:.2f}", file=sys.stderr, flush=True
            )

    def _candidates(self, tokens: Tensor, swaps: int) -> Tensor:
        """The tokens, each time with up to so many swapped for others that lie where the gradient points."""
        embedded = self._words[tokens][None].requires_grad_()
        (gradient,) = torch.autograd.grad(self._loss(embedded).sum(), embedded)
        likely = (gradient[0] @ self._words.T).float().topk(LIKELY, largest=False).indices
        candidates = tokens.repeat(CANDIDATES, 1)
        for candidate in candidates:
            n = int(torch.randint(1, swaps + 1, (), generator=self._random))
            at = torch.randperm(HOSTILE, generator=self._random)[:n]
            candidate[at] = likely[at, torch.randint(LIKELY, (n,), generator=self._random)]
        return candidates

    @torch.no_grad()
    def _losses(self, candidates: Tensor) -> Tensor:
        return torch.cat([self._loss(self._words[part]) for part in candidates.split(JOINED)])

    def _loss(self, embedded: Tensor) -> Tensor:
        """``-log p(target)``, the mean of the victims, for each batch of embedded tokens."""
        answers = self._service.answers(self._service.donor(embedded, self._padding))
        return -answers[..., self._target].mean(0)


@torch.no_grad()
def pooled(model: Path, prompts: Prompts, victims: Sequence[Victim]) -> dict[str, list[bool]]:
    """Which victims get the attacker's answer if one donor is made of three, of which the attacker's is one."""
    service = Service(model, prompts, victims, torch.float32)
    contexts = [prompts.context(0, prefix()), prompts.context(1), prompts.context(2)]
    donors = [service.donor(service.words[context][None]) for context in contexts]
    # For each layer the keys of all three, and the values of all three.
    layers = [[torch.stack(parts) for parts in zip(*layer, strict=True)] for layer in zip(*donors, strict=True)]
    made = {
        "one": donors[0],
        "mean": [(keys.mean(0), values.mean(0)) for keys, values in layers],
        "median": [(keys.median(0).values, values.median(0).values) for keys, values in layers],
    }
    return {name: (service.answers(donor)[:, 0].argmax(-1) == prompts.target).tolist() for name, donor in made.items()}
