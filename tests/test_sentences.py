"""Each test of a suite names a sentence of the contract, which is what an author reads first when it fails; and each
named paragraph of a contract has a test, and a broken plugin that the test catches."""

from collections.abc import Collection
from importlib import import_module
from pkgutil import iter_modules

import pytest

from blendhub import contracts, testing
from blendhub.testing.devices.racing import RaceSuite
from blendhub.testing.devices.streams import StreamSuite
from blendhub.testing.sentences import sentence_of
from tests.suite_runs import CAUGHT, all_tests, paragraphs_of

FURTHER = ("AttentionTests", "MeasuringTests", "ScoringTests", "SharedStoreSuite")
SUITES = [*(getattr(testing, name) for name in (*testing.SUITES.values(), *FURTHER)), StreamSuite, RaceSuite]
TABLES = (
    *(f"tests.test_{name}suite_catches" for name in ("", "device_", "selector_", "store_", "stream_", "transport_")),
    "plugins.fleet.tests.test_conformance",
)
"""The tables of broken plugins."""


@pytest.mark.parametrize("suite", SUITES)
def test_every_test_of_a_suite_stands_for_a_sentence_of_its_contract(suite):
    sentences = {name: sentence_of(suite, name) for name in all_tests(suite)}
    assert {name: sentence for name, sentence in sentences.items() if not sentence.endswith(".")} == {}
    assert len(set(sentences.values())) > 1


def without(sentences: Collection[str]) -> list[str]:
    """The named paragraphs of contracts that have none of these sentences."""
    modules = [import_module(f"blendhub.contracts.{module.name}") for module in iter_modules(contracts.__path__)]
    paragraphs = [text for module in modules for text in paragraphs_of(module)]
    assert len(paragraphs) > len(testing.SUITES)
    return [text for text in paragraphs if not any(sentence and sentence in text for sentence in sentences)]


def test_every_named_paragraph_of_a_contract_has_a_test():
    assert without({sentence_of(suite, test) for suite in SUITES for test in all_tests(suite)}) == []


@pytest.mark.slow
def test_every_named_paragraph_of_a_contract_has_a_broken_plugin_that_its_test_catches():
    for table in TABLES:
        import_module(table)
    assert without(CAUGHT) == []
