"""The prefix matcher: exact reuse of how prompts begin, down to the token.

Stored sequences form a tree. A node stands for tokens that all sequences below it have in common; where sequences part,
a node ends, so the tree has about two nodes for each stored span, whatever was stored before. A prompt is compared with
one path through the tree, token by token; there is no hash to collide or to forge.
"""

import threading

import numpy as np

from blendhub.contracts import Matcher
from blendhub.core.errors import InvalidInput
from blendhub.core.run_table import RunTable
from blendhub.core.spans import Match, Span, join
from blendhub.core.tokens import Tokens
from blendhub_matchers.prefix_tree import Held, Node, merge, shared, split

NODE_TOKENS = 4096
"""The most tokens of a node, so that cutting one and joining two is cheap."""

TOKEN_BYTES = 4
NODE_BYTES = 1000
RUN_BYTES = 500
"""What CPython holds for a node with a span and its place in the dictionaries, and for a run, measured."""


class PrefixMatcher(Matcher):
    """Finds the longest stored beginning of a prompt.

    A node whose KV is gone stays as long as KV below it is stored: its tokens prove what that KV was
    computed after. So a match may go on behind a gap, and what follows is still exact.
    """

    reach = "prefix"
    guaranteed_tokens = 1

    def __init__(self, node_tokens: int = NODE_TOKENS) -> None:
        self._runs = RunTable()
        self._lock = threading.Lock()
        self._most = node_tokens
        self._root = Node(None, 0, np.empty(0, np.uint32))
        self._deepest: dict[int, Node] = {}
        """For each run, the last node that it holds tokens of."""
        self._n_nodes = self._n_tokens = 0

    def add(self, run: int, tokens: Tokens, span: Span, exact: bool = True) -> None:
        with self._lock:
            self._runs.check_add(run, span)
            node, at = self._where_it_grows(run, tokens, span)
            while at < span.end:
                node, at = self._node_at(node, tokens, at, span.end)
                start = max(node.start, span.start)
                held = node.stored.get(run)
                if held:
                    start = max(start, held[-1].end)
                if start < at:
                    node.hold(Held(start, at, run, exact))
            self._deepest[run] = node
            self._runs.add(run, span)

    def discard(self, run: int, span: Span) -> None:
        with self._lock:
            self._runs.discard(run, span)
            self._let_go(run, span)

    def match(self, tokens: Tokens) -> list[Match]:
        matches: list[Match] = []
        with self._lock:
            node, at = self._root, 0
            while at < len(tokens) and at == node.end:
                child = node.children.get(int(tokens[at]))
                if child is None:
                    break
                at += shared(child.tokens, tokens[at : child.end])
                matches += child.tile(at)
                node = child
        return join(matches)

    def __len__(self) -> int:
        return self._runs.tokens

    @property
    def nbytes(self) -> int:
        return self._n_nodes * NODE_BYTES + self._n_tokens * TOKEN_BYTES + len(self._runs) * RUN_BYTES

    def _let_go(self, run: int, span: Span) -> None:
        deepest = node = self._deepest[run]
        lowest: Node | None = None
        while node.parent is not None and node.end > span.start:
            if run in node.stored and node.start < span.end:
                node.drop(run, span)
                lowest = lowest or node
            node = node.parent
        while deepest.parent is not None and run not in deepest.stored:
            deepest = deepest.parent
        if deepest.parent is None:
            del self._deepest[run]
        else:
            self._deepest[run] = deepest
        node, changed = lowest or node, True
        while node.parent is not None and (changed or node.end > span.start):
            parent = node.parent
            changed = self._tidy(node)
            node = parent

    def _where_it_grows(self, run: int, tokens: Tokens, span: Span) -> tuple[Node, int]:
        """A node and its end, up to which the tokens are known to be the tree's; raises if they do not continue the
        run's sequence.
        """
        deepest = node = self._deepest.get(run, self._root)
        if deepest.parent is None:
            return self._root, 0
        end = deepest.stored[run][-1].end
        while node.parent is not None:
            if not np.array_equal(node.tokens[: end - node.start], tokens[node.start : end]):
                raise InvalidInput(f"run {run} cannot grow by tokens of another sequence: those before {span} differ")
            node, end = node.parent, node.start
        return deepest.parent, deepest.start

    def _node_at(self, node: Node, tokens: Tokens, at: int, end: int) -> tuple[Node, int]:
        """The node that goes on behind ``node``, at position ``at``, as the tokens do, made if there is none; and how
        far it does.
        """
        child = node.children.get(int(tokens[at]))
        if child is None:
            return self._grow(node, tokens[at:end])
        reached = at + shared(child.tokens, tokens[at : min(child.end, end)])
        if reached < min(child.end, end):
            self._n_nodes += 1
            upper = split(child, reached)
            for run in upper.stored:
                if run not in child.stored and self._deepest[run] is child:
                    self._deepest[run] = upper
            child = upper
        return child, reached

    def _grow(self, node: Node, tokens: Tokens) -> tuple[Node, int]:
        """Add tokens behind a node: to itself if nothing else is behind it, or as its child."""
        room = self._most - len(node.tokens)
        if node.parent is not None and not node.children and room > 0:
            added = tokens[:room]
            node.tokens = np.concatenate([node.tokens, added])
        else:
            added = tokens[: self._most]
            child = Node(node, node.end, np.array(added))
            node.children[int(added[0])] = child
            self._n_nodes += 1
            node = child
        self._n_tokens += len(added)
        return node, node.end

    def _tidy(self, node: Node) -> bool:
        """Remove a node that proves nothing, or join it with its only child; returns whether it did."""
        assert node.parent is not None
        if not node.stored and not node.children:
            del node.parent.children[int(node.tokens[0])]
            self._n_nodes -= 1
            self._n_tokens -= len(node.tokens)
            return True
        if not node.children and node.chosen[-1].end < node.end:
            self._n_tokens -= node.end - node.chosen[-1].end
            node.tokens = np.array(node.tokens[: node.chosen[-1].end - node.start])
        if len(node.children) != 1:
            return False
        (child,) = node.children.values()
        if len(node.tokens) + len(child.tokens) > self._most:
            return False
        for run in node.stored:
            if self._deepest[run] is node:
                self._deepest[run] = child
        merge(node)
        self._n_nodes -= 1
        return True
