"""Each test of a suite names a sentence of the contract, which is what an author reads first when it fails."""

import pytest

from blendhub import testing
from blendhub.testing.sentences import sentence_of

FURTHER = ("AttentionTests", "MeasuringTests", "ScoringTests", "SharedStoreSuite")


@pytest.mark.parametrize("suite", [*testing.SUITES.values(), *FURTHER])
def test_every_test_of_a_suite_stands_for_a_sentence_of_its_contract(suite):
    suite = getattr(testing, suite)
    tests = [name for name in dir(suite) if name.startswith("test_")]
    sentences = {name: sentence_of(suite, name) for name in tests}
    assert {name: sentence for name, sentence in sentences.items() if not sentence.endswith(".")} == {}
    assert len(set(sentences.values())) > 1
