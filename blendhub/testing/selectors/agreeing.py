"""All ranks pick the same tokens: an answer depends on the question alone."""

from typing import Any

import msgspec

from blendhub.contracts import Selector
from blendhub.testing.run_in_subprocess import run_in_subprocess
from blendhub.testing.selectors.base import BLOCKS, MOVED, SelectorTests
from blendhub.testing.sentences import holds


@holds("the same input gives the same answer in every object with the same options,")
class AgreeingTests(SelectorTests):
    """The same question gets the same answer from every object in every process, whatever was asked before."""

    def test_two_instances_agree(self) -> None:
        assert self.answers() == self.answers()

    def test_what_was_asked_before_does_not_matter(self, selector: Selector) -> None:
        questions = [(moved, ratio) for moved in MOVED.values() for ratio in (0.1, 0.5)]
        forwards = [self.picks(selector, *question) for question in questions]
        backwards = [self.picks(selector, *question) for question in reversed(questions)]
        assert forwards == backwards[::-1]

    def test_a_process_with_another_hash_seed_agrees(self) -> None:
        assert run_in_subprocess(self, hash_seed="4242") == self.answers()

    def answers(self) -> list[Any]:
        """Answers to a list of questions, some of them with many ties to decide."""
        selector = self.create()
        answers = []
        for moved in MOVED.values():
            for block_tokens in BLOCKS:
                scores = self.scores(selector, moved)
                for rounded in (scores, None if scores is None else scores.round()):
                    answers.append(msgspec.to_builtins(self.picks(selector, moved, 0.3, block_tokens, rounded)))
        return answers
