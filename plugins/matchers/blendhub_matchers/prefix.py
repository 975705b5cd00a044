"""The prefix matcher: exact reuse of how prompts begin, down to the token.

Stored sequences form a tree of chunks on a grid from position 0. A node's children stand in the order of their
bytes, so the child that agrees longest with a prompt is always a neighbour of the place where the prompt itself
would stand: whole chunks and the part of a chunk that agrees are found by the same search. It compares tokens and
nothing else; there is no hash to collide or to forge.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from blendhub.contracts import Matcher
from blendhub.errors import InvalidInput
from blendhub.plan import Match, Span, gaps, join
from blendhub.run_table import RunTable
from blendhub.tokens import Tokens
from blendhub_matchers.options import PrefixOptions

TOKEN_BYTES = 4
NODE_BYTES = 450
STORED_SPAN_BYTES = 350
"""What CPython holds for a node and for a stored span with its place in the dictionaries, measured."""


class StoredSpan(NamedTuple):
    """Positions of a chunk whose KV a run holds."""

    span: Span
    exact: bool


class Node:
    """One chunk of tokens below all the tokens before it. A chunk shorter than the grid's has no children."""

    __slots__ = ("children", "keys", "parent", "stored", "tokens")

    def __init__(self, parent: "Node | None", tokens: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.keys: list[bytes] = []
        """The children's tokens, ascending; ``children`` stands in the same order."""
        self.children: list[Node] = []
        self.stored: dict[int, list[StoredSpan]] = {}

    def child(self, tokens: bytes) -> "Node | None":
        at = bisect_left(self.keys, tokens)
        return self.children[at] if at < len(self.keys) and self.keys[at] == tokens else None

    def insert(self, tokens: bytes) -> "Node":
        at = bisect_left(self.keys, tokens)
        self.keys.insert(at, tokens)
        self.children.insert(at, Node(self, tokens))
        return self.children[at]

    def remove(self, child: "Node") -> None:
        at = bisect_left(self.keys, child.tokens)
        del self.keys[at], self.children[at]

    def agreeing(self, tokens: bytes) -> Iterator[tuple["Node", int]]:
        """Children that begin like ``tokens``, and for how many tokens; the longest first."""
        right = bisect_left(self.keys, tokens)
        left = right - 1
        shared_left = _shared(self.keys[left], tokens) if left >= 0 else 0
        shared_right = _shared(self.keys[right], tokens) if right < len(self.keys) else 0
        while shared_left or shared_right:
            if shared_right >= shared_left:
                yield self.children[right], shared_right
                right += 1
                shared_right = _shared(self.keys[right], tokens) if right < len(self.keys) else 0
            else:
                yield self.children[left], shared_left
                left -= 1
                shared_left = _shared(self.keys[left], tokens) if left >= 0 else 0

    def tile(self, wanted: Span, favourite: int | None) -> Iterator[Match]:
        """What its runs hold of ``wanted``, ascending; goes on with the favourite run where it can."""
        at = wanted.start
        while at < wanted.end:
            found = self._holder(at, wanted.end, favourite)
            if found is None:
                at = min((p.span.start for p in self._all() if p.span.start > at), default=wanted.end)
                continue
            favourite, held = found
            end = min(held.span.end, wanted.end)
            yield Match(Span(at, end), favourite, at, held.exact)
            at = end

    def _holder(self, at: int, end: int, favourite: int | None) -> tuple[int, StoredSpan] | None:
        """The favourite if it holds position ``at``, else the run that reaches furthest, the newest of equals."""
        best: tuple[int, StoredSpan] | None = None
        for run in (favourite, *reversed(self.stored)):
            for held in self.stored.get(run, ()) if run is not None else ():
                if held.span.start <= at < held.span.end:
                    if run == favourite or held.span.end >= end:
                        return run, held
                    if best is None or held.span.end > best[1].span.end:
                        best = run, held
        return best

    def _all(self) -> Iterator[StoredSpan]:
        for spans in self.stored.values():
            yield from spans


class PrefixMatcher(Matcher):
    """Finds the longest stored beginning of a prompt.

    A chunk whose KV is gone stays as long as KV below it is stored: its tokens prove what that KV was
    computed after. So a match may go on behind a gap, and what follows is still exact.
    """

    reach = "prefix"

    def __init__(self, options: PrefixOptions) -> None:
        self._chunk = options.chunk_tokens
        self._lock = threading.Lock()
        self._root = Node(None, b"")
        self._runs = RunTable()
        self._nodes: dict[int, dict[int, Node]] = {}
        """Of each run and chunk, the node that holds its spans."""
        self._tree_bytes = 0

    @property
    def guaranteed_tokens(self) -> int:
        return 1

    def insert(self, run: int, tokens: Tokens, span: Span, exact: bool) -> None:
        data = tokens[: span.end].tobytes()
        with self._lock:
            self._runs.check_add(run, span)
            self._check_growth(run, data, span)
            self._runs.add(run, span)
            nodes = self._nodes.setdefault(run, {})
            parent = self._root
            for index, chunk in enumerate(self._chunks(data)):
                node = parent.child(chunk) or self._insert(parent, chunk)
                start = index * self._chunk
                if span.start < start + self._chunk:
                    held = Span(max(start, span.start), min(start + self._chunk, span.end))
                    self._move_tail(run, nodes, index, node)
                    self._own(run, nodes, index, node, StoredSpan(held, exact))
                parent = node

    def remove(self, run: int, span: Span) -> None:
        with self._lock:
            self._runs.check_discard(run, span)
            self._runs.discard(run, span)
            nodes = self._nodes[run]
            for index in range(span.start // self._chunk, (span.end - 1) // self._chunk + 1):
                node = nodes[index]
                spans = node.stored.pop(run)
                rest = [StoredSpan(part, held.exact) for held in spans for part in gaps(held.span, [span])]
                self._tree_bytes += (len(rest) - len(spans)) * STORED_SPAN_BYTES
                if rest:
                    node.stored[run] = rest
                else:
                    del nodes[index]
                    self._prune(node)
            if not nodes:
                del self._nodes[run]

    def find(self, tokens: Tokens) -> list[Match]:
        data = tokens.tobytes()
        matches: list[Match] = []
        with self._lock:
            node: Node | None = self._root
            for index, chunk in enumerate(self._chunks(data)):
                if node is None:
                    break
                favourite = matches[-1].run if matches else None
                child = node.child(chunk)
                matches += self._within_chunk(node, child, chunk, index * self._chunk, favourite)
                node = child
        return join(matches)

    def __len__(self) -> int:
        return self._runs.tokens

    @property
    def nbytes(self) -> int:
        return self._tree_bytes

    def _chunks(self, data: bytes) -> Iterator[bytes]:
        step = self._chunk * TOKEN_BYTES
        return (data[at : at + step] for at in range(0, len(data), step))

    def _within_chunk(
        self, parent: Node, child: Node | None, chunk: bytes, start: int, favourite: int | None
    ) -> list[Match]:
        """The matches of one chunk of the prompt: of the child that equals it, or of children that begin like it."""
        if child is not None:
            whole = Span(start, start + len(chunk) // TOKEN_BYTES)
            held = list(child.tile(whole, favourite))
            if sum(len(match.span) for match in held) == len(whole):
                return held  # the usual case: the child covers the whole chunk
        found: list[Match] = []
        for node, shared in parent.agreeing(chunk):
            missing = list(gaps(Span(start, start + shared), [match.span for match in found]))
            if not missing:
                break  # the following children share fewer tokens
            for span in missing:
                found += node.tile(span, favourite)
            found.sort(key=lambda match: match.span)
        return found

    def _check_growth(self, run: int, data: bytes, span: Span) -> None:
        """A run's new tokens must continue its sequence."""
        index = (span.start - 1) // self._chunk
        tail = self._nodes.get(run, {}).get(index)
        if tail is None:
            return
        start = index * self._chunk * TOKEN_BYTES
        before, chunk = data[:start], data[start : span.start * TOKEN_BYTES]
        parents = []
        node = tail.parent
        while node is not None and node.parent is not None:
            parents.append(node.tokens)
            node = node.parent
        if tail.tokens[: len(chunk)] != chunk or b"".join(reversed(parents)) != before:
            raise InvalidInput(f"run {run} cannot grow by tokens of another sequence: those before {span} differ")

    def _insert(self, parent: Node, chunk: bytes) -> Node:
        self._tree_bytes += NODE_BYTES + len(chunk)
        return parent.insert(chunk)

    def _move_tail(self, run: int, nodes: dict[int, Node], index: int, node: Node) -> None:
        """The last chunk of a run may have grown: its spans move to the longer node."""
        tail = nodes.get(index)
        if tail is not None and tail is not node:
            node.stored[run] = tail.stored.pop(run)
            self._prune(tail)

    def _own(self, run: int, nodes: dict[int, Node], index: int, node: Node, held: StoredSpan) -> None:
        spans = node.stored.setdefault(run, [])
        if spans and spans[-1].exact == held.exact and spans[-1].span.end == held.span.start:
            spans[-1] = StoredSpan(Span(spans[-1].span.start, held.span.end), held.exact)
        else:
            spans.append(held)
            self._tree_bytes += STORED_SPAN_BYTES
        nodes[index] = node

    def _prune(self, node: Node) -> None:
        """Remove what proves nothing any more: nodes without spans and without children."""
        while node.parent is not None and not node.stored and not node.children:
            node.parent.remove(node)
            self._tree_bytes -= NODE_BYTES + len(node.tokens)
            node = node.parent


def _shared(one: bytes, other: bytes) -> int:
    """How many tokens two sequences share from their start."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
