"""What `blendhub advise` chooses."""

import pytest
from blendhub_tools.advice.answering import end_of
from blendhub_tools.advice.choice import Advice, advise, agreed, agreement, in_words, interval, settings_for
from blendhub_tools.advice.judge import ANSWER
from blendhub_tools.advice.outcomes import Outcome
from blendhub_tools.advice.questions import Prompts, Question
from hypothesis import given
from hypothesis import strategies as st

from blendhub.cli import main
from blendhub.outcome.agreement import audits_needed, wilson
from tests.word_model import WORDS, make_tokenizer

CHAT = "{{ bos_token }} user : {{ messages[0]['content'] }} </s>{% if add_generation_prompt %} model :{% endif %}"


def measured(selector: str, ratio: float, same: int, of: int) -> Outcome:
    """One prompt more, of which nothing moved, counts nowhere."""
    outcome = Outcome(selector, "", ratio)
    for number in range(of):
        outcome.note([[*[-0.1] * ANSWER, float(number < same), None]], ratio)
    outcome.note([[None] * (ANSWER + 2)], 1.0)
    return outcome


CASES = st.lists(
    st.builds(
        measured,
        st.sampled_from("ab"),
        st.sampled_from([0.05, 0.1, 0.5]),
        st.integers(0, 200),
        st.sampled_from([0, 200]),
    ),
    max_size=6,
)


@given(CASES, st.floats(0.5, 1))
def test_what_is_advised_recomputes_least_of_all_that_certainly_hold_the_target(cases, target):
    advice = advise(cases, target)
    certain = [one.ratio for one in cases if agreed(one)[1] and interval(one).low >= target]
    assert (advice.chosen is None) == (not certain)
    if advice.chosen:
        assert advice.chosen.ratio == min(certain) and interval(advice.chosen).low >= target
        equal = [one for one in cases if one.ratio == min(certain) and interval(one).low >= target]
        assert agreement(advice.chosen) == max(map(agreement, equal))
    elif advice.promising:
        assert agreement(advice.promising) == max(map(agreement, cases)) > target


def test_a_few_answers_that_agree_are_no_ground_for_a_ratio():
    cases = [measured("a", 0.05, 8, 8), measured("b", 0.15, 8, 8)]
    assert advise(cases, 0.95) == Advice(None, cases[0])
    said = in_words(advise(cases, 0.95), 0.95, 16)
    agreed_on = "a with recompute_ratio 0.05 agreed on all 16 tokens of the answer in 8 of 8 prompts"
    assert f"{agreed_on}. That is too few to be sure of 95%" in said and "73 prompts show it" in said
    assert advise([measured("a", 0.05, 7, 8)], 0.95) == Advice(None, None)


@given(st.floats(0.5, 1), st.floats(0.5, 0.999))
def test_the_number_of_audits_needed_is_the_least_that_shows_the_target(agreed, target):
    needed = audits_needed(agreed, target)
    if needed is None or needed > 1e9:
        assert agreed - target < 1e-3
        return
    # The interval's ends are rounded, too.
    assert wilson(agreed * needed, needed).low >= target - 1e-9
    assert wilson(agreed * (needed - 1), needed - 1).low < target + 1e-9


def test_the_settings_to_paste_keep_what_was_given():
    settings = {"endpoint": "ipc:///x", "selector": {"name": "a", "options": {"k": 3}}}
    advised = {"recompute_ratio": 0.2, "expected_agreement": 0.95}
    assert settings_for(measured("a", 0.2, 9, 9), 0.95, settings) == settings | advised
    other = settings_for(measured("b", 0.2, 9, 9), 0.95, settings)
    assert other == settings | advised | {"selector": {"name": "b"}}
    assert settings_for(None, 0.95, {"store": False}) == {"store": False, "mode": "exact"}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--agreement", "1"], "--agreement 1.0 should be"),
        (["--ratios", "0.1,x"], "--ratios '0.1,x' should be"),
        (["--selectors", "hkvdd"], "no selector 'hkvdd'"),
        (["--settings", '{"selectr": 1}'], "unknown field `selectr`"),
        (["--engine", "["], "--engine '[' is not a JSON object"),
        (["--tokens", "0"], "--tokens 0 should be"),
        (["--card", "/nowhere/card.md"], "--card /nowhere/card.md cannot be written"),
        ([], "has no questions"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_2(tmp_path, capsys, flags, complaint):
    pytest.importorskip("blendhub_selectors", reason="needs a selector to choose from; `make setup` installs it")
    (tmp_path / "data.jsonl").write_text("\n")
    assert main(["advise", "--model", "m", "--data", str(tmp_path / "data.jsonl"), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("blendhub: ") and complaint in error and error.count("\n") == 1


@pytest.mark.parametrize("template", [CHAT, None], ids=["chat template", "none"])
def test_documents_and_questions_of_text_stand_in_the_chat_template(template, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs a real tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_tokenizer(tmp_path, chat_template=template))
    prompts = Prompts(tokenizer, [Question(["Rome is in Italy .", "Anna lives in Rome ."], "Where does Anna live ?")])
    begin, end = (["<s>", "user", ":"], ["</s>", "model", ":"]) if template else (["<s>"], [])
    said = ["Rome", "is", "in", "Italy", ".", "Anna", "lives", "in", "Rome", ".", "Where", "does", "Anna", "live", "?"]
    assert prompts.asked == [[WORDS[word] for word in (*begin, *said, *end)]]
    assert prompts.documents == sorted([WORDS[word] for word in said[at : at + 5]] for at in (0, 5))
    assert all(visit[: len(begin)] == [WORDS[word] for word in begin] for visit in prompts.visits(3))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 60))
def test_every_document_stands_behind_enough_text_once_in_prompts_no_longer_than_needed(lengths, context):
    documents = [[number] * length for number, length in enumerate(lengths)]
    prompts = Prompts(None, [Question([*documents], [99])])
    visits = [*prompts.visits(context)]
    for document in documents:
        places = [(visit, at) for visit in visits for at in range(len(visit))]
        assert any(at >= context and visit[at : at + len(document)] == document for visit, at in places)
    longest = max(len(prompts.asked[0]), context + max(lengths))
    assert all(len(visit) <= longest for visit in visits)


def test_a_right_answer_is_whole_words_of_what_was_said():
    assert end_of("Rome", "She lives in rome, Italy") == len("She lives in rome")
    assert end_of("Rome", "In Romeville.") == 0 and end_of("7", "17 or 7.") == len("17 or 7")
    assert end_of(" $5 ", "It costs $5.") == len("It costs $5")
