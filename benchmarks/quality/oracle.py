"""A selector that knows which tokens depend on other documents: the best that recomputation could do."""

import json
import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import ceil
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from benchmarks.quality.compared import Compared
from benchmarks.quality.reader.task import Prompt
from blendhub.contracts import Selection, Selector
from blendhub.core.spans import Span, join_spans

READ_BEHIND = 3
"""Tokens behind a fact at which a model may read it."""
KEY_TOKENS = 256
"""The number of tokens that name a prompt."""
NAME = "oracle"


class OracleOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: Annotated[str, Meta(description="what `write_answers` wrote")] = ""


class OracleSelector(Selector):
    """Whole facts, in an order drawn at random, then what follows each, as long as the budget lasts."""

    def __init__(self, options: OracleOptions) -> None:
        known = json.loads(Path(options.file).read_text()) if options.file else {}
        self._known: dict[str, list[tuple[int, int]]] = known

    def pick(self, selection: Selection) -> list[Span]:
        if selection.ratio == 1:
            return list(selection.moved)
        moved = np.zeros(len(selection.tokens), bool)
        for span in selection.moved:
            moved[span.start : span.end] = True
        chosen, left = np.zeros_like(moved), ceil(selection.ratio * int(moved.sum()))
        # A prompt that is not of the benchmark has no answers: vLLM asks one when it starts.
        for start, end in self._known.get(_key(selection.tokens.tolist()), []):
            new = moved[start:end] & ~chosen[start:end]
            left -= int(new.sum())
            if left < 0:
                break
            chosen[start:end] |= new
        return join_spans([Span(place, place + 1) for place in np.flatnonzero(chosen).tolist()])


def compared(file: Path) -> Compared:
    return Compared(NAME, NAME, {"file": str(file)}, ships=False)


def write_answers(prompts: Sequence[Prompt], file: Path) -> None:
    """For each prompt the spans to recompute, in order."""
    known = {}
    for prompt in prompts:
        runs = list(dependent_runs(prompt))
        random.Random(len(runs)).shuffle(runs)
        behind = [(end, end + READ_BEHIND) for _, end in runs]
        known[_key([*prompt.header, *(token for one in prompt.documents for token in one)])] = [*runs, *behind]
    file.write_text(json.dumps(known))


def dependent_runs(prompt: Prompt) -> Iterator[tuple[int, int]]:
    """Where in the prompt neighbours stand that depend on text outside their document."""
    begin = len(prompt.header)
    for document, dependent in zip(prompt.documents, prompt.dependent, strict=True):
        runs = join_spans([Span(place, place + 1) for place in sorted(dependent)])
        yield from ((begin + run.start, begin + run.end) for run in runs)
        begin += len(document)


def _key(tokens: Sequence[int]) -> str:
    return blake2b(np.asarray(tokens[:KEY_TOKENS], np.uint32).tobytes(), digest_size=16).hexdigest()
