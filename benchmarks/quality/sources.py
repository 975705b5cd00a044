"""Texts that others wrote: the Python manual, and function descriptions, requests and dialogues of BFCL.

Every second topic, set of functions and dialogue is left for who studies selectors.
"""

import json
import random
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from harness.engines.real_model import PACKAGES, NoRealModel

T = TypeVar("T")
BFCL = PACKAGES / "bfcl_eval" / "data"
SECTION_CHARACTERS = 900
FUNCTION_CHARACTERS = 1000
RESULT_CHARACTERS = 700


class Request(NamedTuple):
    """What a user says, the functions among which to choose, and the name of the right one."""

    text: str
    functions: dict[str, str]
    right: str


class Turn(NamedTuple):
    user: str
    calls: str
    result: str


class Dialogue(NamedTuple):
    functions: dict[str, str]
    """Descriptions by name."""
    turns: list[Turn]


def manual() -> list[list[str]]:
    """For each topic of Python's manual its sections, each of a few paragraphs. Some topics repeat those of others."""
    chosen, seen = [], set[str]()
    for number, (_, text) in enumerate(sorted(topics.items())):
        sections = [section for section in _sections(text) if section not in seen]
        seen.update(sections)
        if number % 2 and sections:
            chosen.append(sections)
    return chosen


def requests() -> list[Request]:
    """Requests with one right function."""
    right = {entry["id"]: entry["ground_truth"] for entry in _entries("possible_answer/BFCL_v4_live_multiple.json")}
    chosen = []
    for entry in _entries("BFCL_v4_live_multiple.json"):
        (messages,), answer, text = entry["question"], right[entry["id"]], entry["question"][0][-1]["content"]
        functions = {function["name"]: json.dumps(function) for function in entry["function"]}
        in_half = crc32(" ".join(sorted(functions)).encode()) % 2
        short = max(map(len, functions.values())) < FUNCTION_CHARACTERS and len(text) < 400
        if in_half and short and len(messages) == 1 and len(answer) == 1:
            chosen.append(Request(text, functions, next(iter(answer[0]))))
    return chosen


def dialogues() -> list[Dialogue]:
    """Dialogues with calls of functions. The data has no results: parts of the state that the functions work on do."""
    described: dict[str, str] = {}
    for file in sorted((BFCL / "multi_turn_func_doc").glob("*.json")):
        for entry in _entries(f"multi_turn_func_doc/{file.name}"):
            described[entry["name"]] = json.dumps({"name": entry["name"], "description": entry["description"]})
    calls = {entry["id"]: entry["ground_truth"] for entry in _entries("possible_answer/BFCL_v4_multi_turn_base.json")}
    chosen = []
    for number, entry in enumerate(_entries("BFCL_v4_multi_turn_base.json")):
        if number % 2:
            names = dict.fromkeys(path.split(".")[-1] for path in entry["path"])
            functions = {name: described[name] for name in names if name in described}
            state, n = json.dumps(entry["initial_config"]), RESULT_CHARACTERS
            begins = [turn * n % max(1, len(state) - n) for turn in range(len(entry["question"]))]
            results = [state[begin : begin + n] for begin in begins]
            users = [turn[0]["content"] if turn else "" for turn in entry["question"]]
            turn_calls = ["; ".join(turn) for turn in calls[entry["id"]]]
            turns = [Turn(*turn) for turn in zip(users, turn_calls, results, strict=True) if turn[0] and turn[1]]
            chosen.append(Dialogue(functions, turns))
    return chosen


def shuffled(texts: list[T], seed: str) -> list[T]:
    return random.Random(seed).sample(texts, len(texts))


def _sections(text: str) -> list[str]:
    """Whole paragraphs, as many as fit in a section."""
    sections = [""]
    for paragraph in text.split("\n\n"):
        if len(sections[-1]) + len(paragraph) > SECTION_CHARACTERS:
            sections.append("")
        sections[-1] += paragraph[:SECTION_CHARACTERS] + "\n\n"
    return [section for section in sections if len(section) > SECTION_CHARACTERS // 2]


def _entries(name: str) -> Iterator[Any]:
    file = BFCL / name
    if not file.exists():
        raise NoRealModel(f"{file}, from which prompts are made, is missing: run `make setup`")
    return (json.loads(line) for line in file.read_text().splitlines())
