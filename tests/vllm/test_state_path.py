"""The way of states through the tokens of a forward: every token and every map once, in the order of positions."""

from functools import partial
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.model.states.recurrent_layer import MapInMaking
from blendhub.vllm.model.states.state_path import PlacedMap, StatePath, steps_of

TEXTS = st.lists(st.tuples(st.sampled_from(["computed", "map", "making"]), st.integers(1, 9)), min_size=1, max_size=12)
"""A prompt: texts that are computed, whose map is known, or whose map is made while they are computed."""


def texts_of(drawn: list[tuple[str, int]]) -> list[tuple[str, Span]]:
    at, texts = 3, list[tuple[str, Span]]()
    for kind, n in drawn:
        texts.append((kind, Span(at, at + n)))
        at += n
    return texts


def named(owners: list[int], part: int, span: Span, makes_map: bool) -> tuple[int, Span]:
    return owners[part], span


@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(1, 30))
def test_forwards_of_any_size_take_each_state_over_all_tokens_in_order(drawn, n_tokens):
    prompts = [texts_of(texts) for texts in drawn]
    for prompt in prompts:  # something is computed behind the last map
        prompt.append(("computed", Span(prompt[-1][1].end, prompt[-1][1].end + 1)))
    maps = [[PlacedMap(span, {}) for kind, span in prompt if kind == "map"] for prompt in prompts]
    making = [[MapInMaking(span) for kind, span in prompt if kind == "making"] for prompt in prompts]
    left = [[span for kind, span in prompt if kind != "map"] for prompt in prompts]
    ends, reached = [prompt[-1][1].end for prompt in prompts], [3] * len(prompts)
    done = []
    while any(left):
        parts, owners = [], []
        for owner, spans in enumerate(left):
            budget, taken = n_tokens, []
            while spans and budget:
                span = spans.pop(0)
                taken.append(Span(span.start, min(span.end, span.start + budget)))
                budget -= len(taken[-1])
                if taken[-1].end < span.end:
                    spans.insert(0, Span(taken[-1].end, span.end))
            if taken:
                until = taken[-1].end if spans else ends[owner]
                path = StatePath(reached[owner], until, maps[owner], making[owner])
                parts.append(RequestTokens(np.zeros(0, np.uint32), (), taken, path))
                owners.append(owner)
                reached[owner] = taken[-1].end
        chosen = RecomputeSet(parts)
        paths: Any = [part.path for part in parts]
        states_of: Any = partial(named, owners)
        steps: Any = steps_of(chosen.owners.tolist(), chosen.spans, paths, states_of)
        for step in steps:
            owner, span = step.states
            assert chosen.positions[step.tokens].tolist() == list(range(span.start, span.end))
            of_map = next(
                (text for kind, text in prompts[owner] if kind == "making" and text.start <= span.start < text.end),
                None,
            )
            assert (step.making.span if step.making else None) == of_map
            assert step.is_last == (of_map is not None and of_map.end == span.end)
            done += [(owner, part) for part in (*(map.span for map in step.before), span)]
            done += [(owner, map.span) for map in step.behind]
    for owner in range(len(prompts)):
        mine = [span for of, span in done if of == owner]
        assert [mine[0].start, *(span.end for span in mine)] == [3, *(span.start for span in mine[1:]), ends[owner]]
