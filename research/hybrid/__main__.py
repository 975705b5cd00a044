"""What answers become when documents move in a hybrid model: ``python -m research.hybrid``, after its training."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.report import Row, finish, parser, row, share_row
from benchmarks.timing import progress
from research.hybrid.model import KV, Inputs, Model, Piece, gated_delta, map_of
from research.hybrid.moving import Copy, as_batch, norms, ways
from research.hybrid.task import LEVELS, WORDS, Prompt, prompt
from research.hybrid.train import WEIGHTS

PROMPTS, COMPOSED, DRAWS = 400, 20, 10
LEVEL = LEVELS[-1]


class Outcome:
    """Of one way: by prompt."""

    def __init__(self) -> None:
        self.is_right: list[bool] = []
        self.is_same: list[bool] = []
        self.kl: list[float] = []


def held_out(rng: random.Random) -> Prompt:
    return prompt(rng, LEVEL, rng.randint(*LEVEL.documents))


def copies(model: Model, rng: random.Random, asked: Prompt) -> list[Copy]:
    """Each document behind the same system text and a document of another prompt."""
    companions = [rng.choice(held_out(rng).documents).tokens for _ in asked.documents]
    return [
        Copy.computed(model, [*asked.system, *other], document.tokens)
        for other, document in zip(companions, asked.documents, strict=True)
    ]


def answers(model: Model, asked: Prompt, donors: Sequence[Copy]) -> Iterator[tuple[str, bool, bool, float]]:
    """By way: whether the answer is right, whether it is full prefill's, and the KL of its first token to it."""
    question, full, said = asked.questions[0], None, 0
    for way, pieces in ways(model, asked.system, donors):
        if full is None:
            logits, _ = model(*pieces, Piece(as_batch(question.tokens)))
            said = int(logits[0, -1].argmax())
        logits, _ = model(*pieces, Piece(as_batch([*question.tokens, said])))
        log_p = logits[0, -2:].log_softmax(-1)
        full = log_p if full is None else full
        is_same = bool((log_p.argmax(-1) == full.argmax(-1)).all())
        kl = float((full[0].exp() * (full[0] - log_p[0])).sum())
        yield way, is_same and tuple(full.argmax(-1).tolist()) == question.fact.value, is_same, kl


def answer_rows(model: Model, n_prompts: int) -> Iterator[Row]:
    rng = random.Random("held out")
    outcomes: dict[str, Outcome] = {}
    named = []
    for _ in progress(range(n_prompts), "prompts"):
        asked = held_out(rng)
        named.append(asked.questions[0].is_named)
        for way, is_right, is_same, kl in answers(model, asked, copies(model, rng, asked)):
            outcome = outcomes.setdefault(way, Outcome())
            outcome.is_right.append(is_right)
            outcome.is_same.append(is_same)
            outcome.kl.append(kl)
    full = outcomes.pop("full")
    yield share_row("right", "full prefill answers rightly", full.is_right)
    for kind, chosen in (("named", named), ("unnamed", [not each for each in named])):
        yield share_row(f"right_{kind}", f"the same, of {kind} documents", picked(full.is_right, chosen))
    for way, outcome in outcomes.items():
        yield share_row(f"{way}_kept", "of these answers, kept", picked(outcome.is_right, full.is_right))
        for kind, wanted in (("named", True), ("unnamed", False)):
            chosen = [right and each is wanted for right, each in zip(full.is_right, named, strict=True)]
            yield share_row(f"{way}_kept_{kind}", f"the same, of {kind} documents", picked(outcome.is_right, chosen))
        yield share_row(f"{way}_same", "same answer as full prefill, right or wrong", outcome.is_same)
        mean = sum(outcome.kl) / n_prompts
        yield row(f"{way}_kl", "KL of the first token to full prefill, mean", "nats", [mean], better="lower")
        yield row(f"{way}_kl_median", "the same, median", "nats", outcome.kl, better="lower")


def picked(values: Sequence[bool], chosen: Sequence[bool]) -> list[bool]:
    return [value for value, is_chosen in zip(values, chosen, strict=True) if is_chosen]


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
