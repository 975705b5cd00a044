"""docs/analyze.md shows what the code does."""

import argparse
from pathlib import Path
from typing import Any

from blendhub.cli import analyze

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_every_option_is_documented():
    parser = argparse.ArgumentParser()
    analyze.add_parser(parser.add_subparsers())
    commands: Any = next(action for action in parser._actions if isinstance(action.choices, dict))
    options = {text for action in commands.choices["analyze"]._actions for text in action.option_strings}
    text = (DOCS / "analyze.md").read_text(encoding="utf-8")
    assert {option for option in options - {"-h", "--help"} if f"`{option}" not in text} == set()
