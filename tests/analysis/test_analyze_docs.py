"""docs/analyze.md shows what the code does."""

import argparse
from pathlib import Path

from blendhub.cli import analyze
from examples.analyze.__main__ import QUESTIONS, analyzed
from examples.analyze.log import as_lines
from examples.analyze.picture import draw

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_every_option_is_documented():
    parser = argparse.ArgumentParser()
    analyze.add_parser(parser.add_subparsers())
    commands = next(action for action in parser._actions if isinstance(action.choices, dict))
    options = {text for action in commands.choices["analyze"]._actions for text in action.option_strings}
    text = (DOCS / "analyze.md").read_text(encoding="utf-8")
    assert {option for option in options - {"-h", "--help"} if f"`{option}" not in text} == set()


def test_the_picture_is_what_the_example_draws(tmp_path):
    log = tmp_path / "requests.jsonl"
    log.write_text(as_lines(QUESTIONS), encoding="utf-8")
    drawn = draw(analyzed(log, tmp_path / "report.html"))
    known = (DOCS / "analyze.svg").read_text(encoding="utf-8")
    assert drawn == known, "python -m examples.analyze && cp build/analyze/report.svg docs/analyze.svg"
