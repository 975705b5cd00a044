"""What answers become when documents move in a hybrid model: ``python -m research.hybrid``, after its training."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.report import Row, finish, parser, row, share_row
from benchmarks.timing import progress
from research.hybrid.model import KV, Inputs, Model, Piece, gated_delta, map_of
from research.hybrid.moving import Copy, as_batch, norms, ways
from research.hybrid.task import LEVELS, WORDS, Prompt, Question, prompt
from research.hybrid.train import WEIGHTS

PROMPTS, COMPOSED, DRAWS = 150, 20, 5
LEVEL = LEVELS[-1]


class Outcome(NamedTuple):
    """Of one prompt in one way. The tokens that full prefill says are given to each way, one after another."""

    question: Question
    said: list[int]
    """By full prefill."""
    ours: list[int]
    kl: float

    @property
    def is_right(self) -> bool:
        """Full prefill knows the value."""
        return (*self.said[:2],) == self.question.fact.value

    @property
    def is_placed(self) -> bool:
        """It knows the document's title, too."""
        return (*self.said,) == self.question.answer

    @property
    def is_kept(self) -> bool:
        return self.ours[:2] == self.said[:2]


def held_out(rng: random.Random) -> Prompt:
    return prompt(rng, LEVEL, rng.randint(*LEVEL.documents))


def copies(model: Model, rng: random.Random, asked: Prompt) -> list[Copy]:
    """Each document behind the same system text and a document of another prompt."""
    companions = [rng.choice(held_out(rng).documents).tokens for _ in asked.documents]
    return [
        Copy.computed(model, [*asked.system, *other], document.tokens)
        for other, document in zip(companions, asked.documents, strict=True)
    ]


def outcomes(model: Model, asked: Prompt, donors: Sequence[Copy]) -> Iterator[tuple[str, Outcome]]:
    question, full, said = asked.questions[0], torch.zeros(0), list[int]()
    for way, pieces in ways(model, asked.system, donors):
        while len(said) < len(question.answer):
            logits, _ = model(*pieces, Piece(as_batch([*question.tokens, *said])))
            said.append(int(logits[0, -1].argmax()))
            full = logits[0, len(question.tokens) - 1].log_softmax(-1)
        logits, _ = model(*pieces, Piece(as_batch([*question.tokens, *said[:-1]])))
        ours = logits[0, -len(said) :]
        kl = float((full.exp() * (full - ours[0].log_softmax(-1))).sum())
        yield way, Outcome(question, said, ours.argmax(-1).tolist(), kl)


def answer_rows(model: Model, n_prompts: int) -> Iterator[Row]:
    rng = random.Random("held out")
    by_way: dict[str, list[Outcome]] = {}
    for _ in progress(range(n_prompts), "prompts"):
        asked = held_out(rng)
        for way, outcome in outcomes(model, asked, copies(model, rng, asked)):
            by_way.setdefault(way, []).append(outcome)
    full = by_way.pop("full")
    yield share_row("right", "full prefill says the right value", [each.is_right for each in full])
    yield share_row("right_title", "and then the title of its document", [each.is_placed for each in full])
    for way, all_of in by_way.items():
        yield share_row(f"{way}_kept", "right values kept", [each.is_kept for each in all_of if each.is_right])
        yield share_row(f"{way}_same", "same value as full prefill, right or wrong", [each.is_kept for each in all_of])
        kl = [each.kl for each in all_of]
        yield row(f"{way}_kl", "KL of the first token to full prefill, mean", "nats", [fmean(kl)], better="lower")
        yield row(f"{way}_kl_median", "the same, median", "nats", kl, better="lower")


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def rounding_rows(model: Model, draws: int) -> Iterator[Row]:
    """The state behind twenty documents, composed from maps, and computed token by token in float64."""
    rng = random.Random("composed")
    errors: dict[str, list[float]] = {"float32": [], "bfloat16": [], "bfloat16_sum": []}
    for _ in progress(range(draws), "compositions"):
        donors: list[Copy] = []
        while len(donors) < COMPOSED:
            donors += copies(model, rng, held_out(rng))
        for layers in zip(*(copy.kept for copy in donors[:COMPOSED]), strict=True):
            if isinstance(layers[0], KV):
                continue
            state = torch.zeros_like(layers[0][1].b)
            exact, composed = state.double(), dict.fromkeys(errors, state)
            for inputs, end in layers:
                exact = gated_delta(Inputs(*(x.double() for x in inputs)), exact)[1]
                made = map_of(inputs, end.tail)
                a, b = rounded(made.a), rounded(made.b)
                composed["float32"] = made.a @ composed["float32"] + made.b
                composed["bfloat16"] = a @ composed["bfloat16"] + b
                composed["bfloat16_sum"] = rounded(a @ composed["bfloat16_sum"] + b)
            for kind, ours in composed.items():
                errors[kind].append(float((ours - exact).norm() / exact.norm()))
    for kind, values in errors.items():
        what = f"{COMPOSED} documents, maps in {kind}: relative error of the state, by layer"
        yield row(f"composed_{kind}", what, "x", values, better="lower")


def forgotten_rows(model: Model, draws: int) -> Iterator[Row]:
    rng = random.Random("forgotten")
    by_length: dict[str, list[Tensor]] = {}
    for _ in progress(range(draws), "norms"):
        asked = held_out(rng)
        rest = [document.tokens for document in asked.documents]
        _, kept = model(Piece(as_batch(asked.system)), Piece(as_batch([token for tokens in rest for token in tokens])))
        ends = [0]
        for tokens in rest:
            ends.append(ends[-1] + len(tokens))
        spans = [*pairwise(ends), *((0, end) for end in ends[2:])]
        for begin, end in spans:
            low = (end - begin) // 20 * 20 if end - begin < 80 else (end - begin) // 80 * 80
            name = f"{low}_{low + (20 if low < 80 else 80)}"
            found = [
                norms(map_of(Inputs(*(x[:, :, begin:end] for x in layer[0])), layer[1].tail).a)
                for layer in kept
                if not isinstance(layer, KV)
            ]
            by_length.setdefault(name, []).append(torch.cat(found))
    for name, found in sorted(by_length.items(), key=lambda each: int(each[0].split("_")[0])):
        heads = torch.stack(found).flatten()
        for bound in (1e-2, 1e-3):
            what = f"{len(found)} texts of {name.replace('_', ' to ')} tokens: heads whose A has a norm below {bound:g}"
            yield row(f"forgotten_{name}_{bound:g}", what, "share", [float((heads < bound).float().mean())])


@torch.no_grad()
def main() -> None:
    options = parser(__doc__ or "").parse_args()
    if not WEIGHTS.exists():
        raise SystemExit(f"{WEIGHTS} does not exist; python -m research.hybrid.train makes it")
    model = Model(WORDS)
    model.load_state_dict(torch.load(WEIGHTS))
    n_prompts, draws = (10, 1) if options.quick else (PROMPTS, DRAWS)
    measured = [*answer_rows(model, n_prompts), *rounding_rows(model, draws), *forgotten_rows(model, 10 * draws)]
    finish("hybrid", measured, "torch", options.json)


if __name__ == "__main__":
    main()
