"""The service whose answers are compared with vLLM's own: what it asks, and how its rows count."""

import pytest

pytest.importorskip("vllm", reason="the benchmark serves with vLLM; `make setup` installs it")
pytest.importorskip("transformers", reason="prompts are tokens of a real model; `make setup` installs it")

from collections import Counter

from benchmarks.quality.sources import BFCL
from benchmarks.quality.workloads import Chat
from benchmarks.service import DOCUMENTS, RETRIEVED, Asked, Said, library, questions, rows
from tests.benchmarks.test_quality import Letters, text


def test_each_question_is_about_one_of_five_documents_and_no_prompt_comes_twice():
    if not BFCL.exists():
        pytest.skip("its texts are a package; `make setup` downloads it")
    documents = library()
    assert Counter(document.kind for document in documents) == {"life": 20, "section": 10, "function": 10}
    assert len({document.text for document in documents}) == DOCUMENTS
    asked = [*questions(Chat(Letters()), 60)]
    assert len({tuple(question.prompt) for question in asked}) == 60
    for question in asked:
        retrieved = [document for document in documents if document.text in text(question.prompt)]
        assert len(retrieved) == RETRIEVED and question.kind in {document.kind for document in retrieved}
        assert question.right or question.kind == "section"


def test_what_is_kept_is_counted_among_what_vllm_alone_answers_right():
    def asked(kind: str, right: list[int], *answers: tuple[list[int], float, int]) -> Asked:
        return Asked(kind, [], right, [Said(*answer) for answer in answers])

    wrong = asked("life", [9], ([1, 2], 2.0, 100), ([9, 2], 1.0, 50))
    kept = asked("life", [1], ([1, 2], 2.0, 100), ([1, 3], 1.0, 50))
    lost = asked("section", [1, 2], ([1, 2], 2.0, 100), ([1, 3], 0.5, 25))
    unknown = asked("section", [], ([1, 2], 2.0, 100), ([1, 3], 0.5, 25))
    made = {row.id: row.value for row in rows([wrong, kept, lost, unknown], [{}])}
    assert made["service_kept"] == 1 / 2 and made["service_same"] == 0
    assert made["service_kept_life"] == 1 and made["service_kept_section"] == 0
    assert made["service_time"] == 0.25 and made["service_computed"] == 0.375 and made["service_computed_late"] == 0.25
