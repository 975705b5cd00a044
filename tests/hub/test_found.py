"""What a lookup finds of texts that requests stored, each KV of another provenance, compared with a slow twin."""

from hypothesis import given, settings
from hypothesis import strategies as st

from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span
from tests.hub.hub_direct import DirectHub
from tests.hub.lookup_oracle import check_found
from tests.hub.machine_engines import PROMPT, PROMPTS, TEXT, TEXTS
from tests.hub.machine_writing import PROVENANCE

START = st.sampled_from([0, 0, 20, 32])
STORED = st.lists(st.tuples(TEXT, START, PROVENANCE), min_size=1, max_size=6)
ASKED = st.lists(st.tuples(PROMPT, st.sampled_from([None, 0.0, 0.3]), st.sampled_from([0, 0, 50])), max_size=12)


@settings(max_examples=200, deadline=None)
@given(stored=STORED, slots=st.integers(8, 48), asked=ASKED)
def test_nothing_that_may_be_used_is_hidden_by_what_may_not(
    stored: list[tuple[int, int, Provenance]], slots: int, asked: list[tuple[int, float | None, int]]
) -> None:
    hub = DirectHub(slots)
    try:
        member, texts = hub.join(), {}
        for text, start, provenance in stored:
            reserved = member.store(TEXTS[text], Span(start, len(TEXTS[text])), provenance=provenance)
            if run := hub.index.runs.get(reserved.run):
                texts[run.key] = TEXTS[text]
        for prompt, settled, skip in asked:
            found = member.lookup(PROMPTS[prompt], settled=settled, skip_prefix_n_tokens=skip, acquire=False)
            chunks = set(hub.index.chunks())
            check_found(hub.index, chunks, texts, PROMPTS[prompt], found, skip, settled)
        hub.state.check_integrity()
    finally:
        hub.close()
