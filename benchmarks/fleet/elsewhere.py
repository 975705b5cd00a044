"""Documents that one machine's engine computed, asked for on another: how soon the answer starts."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.quality.serving import SETTINGS
from benchmarks.report import Row, row
from benchmarks.timing import progress
from benchmarks.ttft import DOCUMENT_TOKENS, DOCUMENTS, OPTIONS, Texts, first_token_s, make_model
from harness.engines import Engine
from harness.servers.served_hub import two_hubs, wait_until_followed


def elsewhere(place: Path, *, quick: bool) -> Iterator[Row]:
    ratios = []
    model = make_model(place, quick)
    with two_hubs(place, (1.0, 1.0)) as hubs, ExitStack() as stack:
        plain = stack.enter_context(Engine(model, **OPTIONS))
        writer, reader = (
            stack.enter_context(Engine(model, SETTINGS | {"endpoint": hub.endpoint}, **OPTIONS)) for hub in hubs
        )
        for number in progress(range(-1, 2 if quick else 7), "elsewhere"):
            texts = Texts(100 + number)  # which the reader's machine has not fetched before
            for document in texts.documents:
                writer.one(document, mode="exact")
                writer.forget()
            wait_until_followed(*hubs)
            full = first_token_s(plain, texts.shuffled(), {})
            reader.forget()
            answer = reader.one(texts.shuffled(), recompute_ratio=0.15, store=False)
            if answer.report["moved_tokens"] < 0.9 * DOCUMENTS * DOCUMENT_TOKENS:
                raise SystemExit(f"the documents of another machine were not reused: {answer.report}")
            if number >= 0:  # the first round warms up
                ratios.append(answer.first_token_s / full)
    what = "moved documents of another machine, 15% recomputed: time to first token, relative to full prefill"
    yield row("ttft_elsewhere", what, "x", ratios, 0.40, "lower")
