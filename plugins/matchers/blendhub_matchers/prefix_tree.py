"""The nodes of the prefix matcher's tree, and the stored spans that runs hold of their tokens."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from blendhub.core.spans import Match, Span, gaps
from blendhub.core.tokens import Tokens


class Held(NamedTuple):
    """Positions of a node whose KV a run holds."""

    start: int
    end: int
    run: int
    exact: bool


class Node:
    """Some tokens, from position ``start`` on, below all the tokens before them."""

    __slots__ = ("children", "chosen", "n_chosen", "n_stored", "parent", "start", "stored", "tokens")

    def __init__(self, parent: "Node | None", start: int, tokens: Tokens) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.children: dict[int, Node] = {}
        """The children, by their first tokens."""
        self.stored: dict[int, list[Held]] = {}
        """The spans that each run holds here, ascending."""
        self.chosen: list[Held] = []
        """For each stored position one run that holds it, ascending: what a match names, however many runs hold it."""
        self.n_stored = self.n_chosen = 0
        """Tokens in ``stored`` and in ``chosen``: more in the former where several runs hold a position."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def tile(self, until: int) -> Iterator[Match]:
        """The stored spans of the node up to a position, ascending."""
        for held in self.chosen:
            if held.start >= until:
                return
            span = Span(held.start, min(held.end, until))
            yield Match(span, held.run, held.start, held.exact)

    def hold(self, held: Held) -> None:
        """A run holds this now; it held none of it before."""
        spans = self.stored.setdefault(held.run, [])
        spans.append(held)
        _join_last(spans)
        self.n_stored += held.end - held.start
        self._choose(held)

    def drop(self, run: int, span: Span) -> None:
        """A run holds nothing of the span any more."""
        spans = self.stored.pop(run)
        kept = [part for held in spans for part in _without(held, span)]
        if kept:
            self.stored[run] = kept
        self.n_stored -= _total(spans) - _total(kept)
        lost = [held for held in self.chosen if held.run == run and held.start < span.end and span.start < held.end]
        if not lost:
            return
        self.chosen = [part for held in self.chosen for part in (_without(held, span) if held.run == run else [held])]
        self.n_chosen = _total(self.chosen)
        if self.n_chosen < self.n_stored:
            self._choose_others([Span(max(held.start, span.start), min(held.end, span.end)) for held in lost])

    def take(self, spans: Iterable[Held], chosen: Iterable[Held]) -> None:
        """Hold what another node held for tokens that are now this node's. They come behind those held here."""
        for held in spans:
            of_run = self.stored.setdefault(held.run, [])
            of_run.append(held)
            _join_last(of_run)
            self.n_stored += held.end - held.start
        for held in chosen:
            self.chosen.append(held)
            _join_last(self.chosen)
            self.n_chosen += held.end - held.start

    def _choose(self, held: Held) -> None:
        """Name it for the positions where no run is named, or one that is no better: the newest of exact ones, as a
        second one is stored only where the first may not move."""
        chosen, span = self.chosen, Span(held.start, held.end)
        if not chosen or chosen[-1].end <= held.start:  # mostly: nodes grow at their ends
            chosen.append(held)
            _join_last(chosen)
            self.n_chosen += len(span)
            return
        first = max(bisect_right(chosen, held.start, key=_start) - 1, 0)
        last = bisect_right(chosen, held.end, key=_start)
        kept: list[Held] = []
        for earlier in chosen[first:last]:
            kept += _without(earlier, span) if held.exact else [earlier]
        free = gaps(span, [Span(part.start, part.end) for part in kept])
        joined: list[Held] = []
        for part in sorted([*kept, *(held._replace(start=gap.start, end=gap.end) for gap in free)]):
            joined.append(part)
            _join_last(joined)
        self.n_chosen += _total(joined) - _total(chosen[first:last])
        chosen[first:last] = joined

    def _choose_others(self, lost: list[Span]) -> None:
        """Name other runs for these positions; exact ones first, and of these the newest."""
        others = [held for spans in reversed(list(self.stored.values())) for held in spans]
        for held in sorted(others, key=lambda held: not held.exact):
            if self.n_chosen == self.n_stored:
                return
            for span in lost:
                start, end = max(held.start, span.start), min(held.end, span.end)
                if start < end:
                    self._choose(held._replace(start=start, end=end))


def shared(left: Tokens, right: Tokens) -> int:
    """How many tokens two sequences share from their start."""
    length = min(len(left), len(right))
    differing = left[:length] != right[:length]
    first = int(differing.argmax()) if length else 0
    return first if length and differing[first] else length


def split(node: Node, at: int) -> Node:
    """Cut a node at a position; returns a new node for what is before. The old one stands for the rest."""
    assert node.parent is not None
    cut = at - node.start
    upper = Node(node.parent, node.start, np.array(node.tokens[:cut]))
    node.parent.children[int(node.tokens[0])] = upper
    spans, chosen = [held for of_run in node.stored.values() for held in of_run], node.chosen
    node.parent, node.start, node.tokens = upper, at, np.array(node.tokens[cut:])
    upper.children[int(node.tokens[0])] = node
    node.stored, node.chosen, node.n_stored, node.n_chosen = {}, [], 0, 0
    before, behind = Span(upper.start, at), Span(at, node.end)
    upper.take(*([part for held in all_held for part in _without(held, behind)] for all_held in (spans, chosen)))
    node.take(*([part for held in all_held for part in _without(held, before)] for all_held in (spans, chosen)))
    return upper


def merge(node: Node) -> Node:
    """Make one node of this one and its only child; returns it."""
    (child,) = node.children.values()
    assert node.parent is not None
    node.parent.children[int(node.tokens[0])] = child
    spans, chosen = [held for of_run in child.stored.values() for held in of_run], child.chosen
    child.parent, child.start, child.tokens = node.parent, node.start, np.concatenate([node.tokens, child.tokens])
    child.stored, child.chosen = node.stored, node.chosen
    child.n_stored, child.n_chosen = node.n_stored, node.n_chosen
    child.take(spans, chosen)
    return child


def _without(held: Held, span: Span) -> list[Held]:
    """The parts of ``held`` outside a span."""
    if held.end <= span.start or span.end <= held.start:
        return [held]
    parts = (held._replace(end=min(held.end, span.start)), held._replace(start=max(held.start, span.end)))
    return [part for part in parts if part.start < part.end]


def _join_last(spans: list[Held]) -> None:
    """Make the last two one, if they touch and do not differ otherwise."""
    if len(spans) > 1 and spans[-2].end == spans[-1].start and spans[-2][2:] == spans[-1][2:]:
        last = spans.pop()
        spans[-1] = spans[-1]._replace(end=last.end)


def _start(held: Held) -> int:
    return held.start


def _total(spans: Iterable[Held]) -> int:
    return sum(held.end - held.start for held in spans)
