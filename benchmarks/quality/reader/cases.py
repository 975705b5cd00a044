"""The reader's prompts as a workload beside those of the real model: it shows mechanisms, and decides nothing."""

import random
from collections.abc import Iterator
from itertools import count

from benchmarks.quality.reader.task import make_prompt
from benchmarks.quality.real.workloads import QUESTIONS, RealCase, RealQuestion

READER = "reader"


def reader_cases() -> Iterator[RealCase]:
    for seed in count():
        prompt = make_prompt(seed, "test")
        asked = random.Random(seed).sample(prompt.questions, QUESTIONS)
        yield RealCase([prompt.header, *prompt.documents], [RealQuestion(one.tokens, [one.answer]) for one in asked])
