"""How wrong moved KV is by what stood before its text when it was computed: ``python -m research.donors``.

In plain torch, on SmolLM2: every document of a prompt is a copy that was computed elsewhere; header and question are
computed. Nothing is recomputed.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.quality.workloads import WORKLOADS, Case, Chat, Tokens
from benchmarks.report import Row, finish, parser, row
from benchmarks.timing import progress
from harness.engines.real_model import make_real_model

KV: TypeAlias = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, ``[1, heads, tokens, width]``."""
DEPTHS = {"0": 0, "64": 64, "128": 128, "256": 256, "in_company": None}
"""Tokens of other documents before a copy; None: whole ones, one at least."""
ASKED = ("facts", "across", "tools", "manual")
PROMPTS = 4
"""The number of prompts of each workload."""
RESAMPLES = 400


class Model:
    def __init__(self, path: str) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model, self._words = loaded.model, loaded.lm_head

    def compute(self, tokens: Tokens, before: KV) -> tuple[KV, Tensor]:
        """The KV of these tokens alone, and the log-probabilities of the next one."""
        cache: Any = DynamicCache()
        for layer, (keys, values) in enumerate(before):
            cache.update(keys, values, layer)
        said = self._model(input_ids=torch.tensor([tokens]), past_key_values=cache).last_hidden_state
        own = [(layer.keys[:, :, -len(tokens) :], layer.values[:, :, -len(tokens) :]) for layer in cache.layers]
        return own, self._words(said[0, -1]).log_softmax(-1)

    def moved(self, kv: KV, by: int) -> KV:
        """KV at positions that are so many further on."""
        angle = torch.cat([by * self._model.rotary_emb.inv_freq.float()] * 2)
        turned = []
        for keys, values in kv:
            left, right = keys.chunk(2, -1)
            turned.append((keys * angle.cos() + torch.cat([-right, left], -1) * angle.sin(), values))
        return turned


def joined(parts: Sequence[KV]) -> KV:
    return [
        (torch.cat([k for k, _ in layer], 2), torch.cat([v for _, v in layer], 2)) for layer in zip(*parts, strict=True)
    ]


def lost(model: Model, case: Case, others: Sequence[Tokens], depth: int | None, rng: random.Random) -> float:
    """The KL of the first token to full prefill."""
    header, *documents = case.pieces
    question = case.questions[0].tokens
    head, _ = model.compute(header, [])
    _, full = model.compute([*itertools.chain(*documents), *question], head)
    parts, at = [head], len(header)
    for document in documents:
        n_others = rng.randint(1, len(others) - 1) if depth is None else len(others)
        before = [*itertools.chain(*rng.sample(others, n_others))][:depth]
        company, _ = model.compute(before, head) if before else ([], None)
        copy, _ = model.compute(document, joined([head, company]) if company else head)
        parts.append(model.moved(copy, at - len(header) - len(before)))
        at += len(document)
    _, ours = model.compute(question, joined(parts))
    return float((full.exp() * (full - ours)).sum())


@torch.no_grad()
def rows(model: Model, chat: Chat, workloads: Sequence[str], prompts: int) -> Iterator[Row]:
    asked = []
    for name in workloads:
        cases = [*itertools.islice(WORKLOADS[name](chat), prompts + 1)]
        for case, company in itertools.pairwise(cases):
            asked.append((case, [piece for piece in company.pieces[1:] if piece not in case.pieces]))
    draws = np.random.default_rng(0).integers(0, len(asked), (RESAMPLES, len(asked)))
    for name, depth in DEPTHS.items():
        rng = random.Random(name)
        kl = np.array([lost(model, *one, depth, rng) for one in progress(asked, f"behind {name}")])
        low, high = np.quantile(kl[draws].mean(1), [0.025, 0.975])
        what = f"{len(asked)} prompts, documents computed behind the header and {name} tokens of others: KL, "
        spread = float(low), float(high)
        yield row(f"donors_{name}_mean", f"{what}mean", "nats", [float(kl.mean())], better="lower", spread=spread)
        yield row(f"donors_{name}", f"{what}median", "nats", kl.tolist(), better="lower")


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    path = str(make_real_model())
    chat = Chat(AutoTokenizer.from_pretrained(path))
    measured = rows(Model(path), chat, *((ASKED[:1], 1) if options.quick else (ASKED, PROMPTS)))
    finish("donors", [*measured], "torch transformers", options.json)


if __name__ == "__main__":
    main()
