"""``make quality``: the experiment on a model, texts and tasks that others made."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from benchmarks.quality.compared import SELECTORS, Compared
from benchmarks.quality.measure import FULL, REUSE, Asked, store
from benchmarks.quality.real.chat import Chat
from benchmarks.quality.real.measure import Workload
from benchmarks.quality.real.workloads import LONGEST, WORKLOADS, RealCase, earlier
from benchmarks.quality.serving import READER, Serving, folder
from blendhub.tools.advice import forced
from blendhub.tools.advice.judge import LOGPROBS
from blendhub.tools.advice.outcomes import Outcome
from blendhub.vllm.settings import Settings
from harness.engines.real_model import make_real_model

RATIOS = (0.05, 0.15, 0.3)
OPTIONS: dict[str, Any] = READER | {
    "max_model_len": LONGEST,
    "max_logprobs": LOGPROBS,
    "logits_processors": [forced.NAME],
    # What is said is known before the next token only then.
    "async_scheduling": False,
}


MANY, FEW = 200, 8
"""Questions of each workload."""


def run(
    questions: int, selectors: Sequence[Compared] = SELECTORS, workloads: Sequence[str] = tuple(WORKLOADS)
) -> Iterator[Outcome]:
    from transformers import AutoTokenizer

    model = str(make_real_model())
    chat = Chat(AutoTokenizer.from_pretrained(model))
    for name in workloads:
        cases = first_cases(WORKLOADS[name](chat, "test"), questions)
        visits = earlier(cases)
        with folder() as place:
            serving = Serving(model, place, sum(map(len, visits)), **OPTIONS)
            with serving.storing() as keeper:
                workload = Workload(name, cases)
                store(keeper, visits)
                yield workload.measure(keeper, FULL)
                yield workload.measure(keeper, REUSE)
                for compared in selectors:
                    with serving.choosing(compared) as engine:
                        for ratio in RATIOS:
                            yield workload.measure(engine, Asked.of(compared, ratio, "", serving.layers))
                        if compared.name == Settings().selector.name and len(cases[0].questions) > 1:
                            asked = Asked.of(compared, 0.15, "settled", serving.layers)
                            yield workload.measure(engine, msgspec.structs.replace(asked, apart=False))


def first_cases(cases: Iterator[RealCase], questions: int) -> list[RealCase]:
    """As many as have so many questions; at least two: text is computed among that of another case."""
    chosen: list[RealCase] = []
    for case in cases:
        if len(chosen) >= 2 and sum(len(one.questions) for one in chosen) >= questions:
            break
        chosen.append(case)
    return chosen
