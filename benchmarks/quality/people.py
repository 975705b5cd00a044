"""Biographies of people who never lived, and questions about them."""

import random
from collections.abc import Iterator
from typing import NamedTuple

FIRST = (
    "Mirela Oskar Tamsin Joren Lucinda Bastian Helga Corwin Petra Anselm Ottilie Dorian Sabine Lothar Ingrid Caspian "
    "Verena Rufus Elowen Magnus Rosalind Tiber Wilma Ivo Maren Leopold Greta Silvan Odette Klaus Imogen Fabian"
)
LAST = (
    "Vantner Holloway Brisk Aldermann Quill Ferncastle Oakhurst Tremblay Winterbourne Castellan Marlow Hexley Drummond "
    "Pellingham Straker Lindqvist Barrow Ashgrove Kestrel Moorland Falkner Thorne Greaves Hawkins Summers Rookwood"
)
TOWNS = (
    "Lisbon Vienna Oslo Dublin Prague Athens Warsaw Madrid Geneva Cairo Boston Denver Toronto Sydney Lima Havana "
    "Berlin Milan Seoul Kyoto"
)
TRADES = (
    "baker carpenter violinist geologist surgeon librarian pilot lawyer botanist clockmaker painter teacher chemist "
    "sailor architect journalist"
)
ANIMALS = "parrot tortoise rabbit horse ferret goat falcon hedgehog donkey peacock"
COLOURS = "red blue green yellow purple orange white black silver pink"
ANYTHING = (
    "The street where the family lived was known for its old trees and for a market that was held twice a week.",
    "Neighbours remember long evenings with music, cards and stories that nobody quite believed.",
    "A small archive in the town hall keeps several letters, two photographs and a diary from those years.",
    "Travel was slow at the time, and a journey to the coast could take the better part of a week.",
    "Friends described a patient person who rarely spoke about work and liked to walk along the river at dawn.",
    "Later biographers disagree about many details, but all of them mention the remarkable handwriting and the maps.",
    "The winters were hard, and more than once the whole village had to share its stores of flour and wood.",
    "A local newspaper printed a short article about the anniversary, with a drawing of the house and its garden.",
    "In the summer the garden was open to visitors, who were offered lemonade and a tour of the greenhouse.",
    "Several objects from the estate were sold at an auction, among them a globe, a telescope and a set of chairs.",
)


class TextQuestion(NamedTuple):
    question: str
    begun: str
    """How the answer begins."""
    right: str
    """How it goes on."""
    choices: str = ""
    """The words of the right one's kind."""


class Person(NamedTuple):
    name: str
    text: str
    born: int
    questions: list[TextQuestion]


def people(rng: random.Random) -> Iterator[Person]:
    """People without end; neighbours have different names. Every second name is left for who studies selectors."""
    names = [f"{first} {last}" for first in FIRST.split()[1::2] for last in LAST.split()[1::2]]
    while True:
        rng.shuffle(names)
        yield from (_person(rng, name) for name in names)


def older(*pair: Person) -> TextQuestion:
    """A question that needs the texts of both."""
    older = min(pair, key=lambda person: person.born)
    first, second = (person.name for person in pair)
    question = f"Who was born first, {first} or {second}?"
    return TextQuestion(question, f"Of {first} and {second}, the one who was born first is", f" {older.name}")


def _person(rng: random.Random, name: str) -> Person:
    town, trade, animal, colour = (rng.choice(words.split()) for words in (TOWNS, TRADES, ANIMALS, COLOURS))
    born = rng.randrange(1801, 1990)
    they, their = rng.choice([("He", "His"), ("She", "Her")])
    facts = [
        f"{name} was born in {town} in {born}.",
        f"{they} worked as a {trade} for many years.",
        f"{their} house was painted {colour}.",
        f"{they} kept a {animal} as a pet.",
    ]
    between = rng.sample(ANYTHING, rng.randint(5, 8))
    sentences = [sentence for pair in zip(facts, between, strict=False) for sentence in pair] + between[len(facts) :]
    questions = [
        TextQuestion(f"In which city was {name} born?", f"{name} was born in", f" {town}", TOWNS),
        TextQuestion(f"What was the job of {name}?", f"{name} worked as a", f" {trade}", TRADES),
        TextQuestion(
            f"Which colour had the house of {name}?", f"The house of {name} was painted", f" {colour}", COLOURS
        ),
        TextQuestion(f"Which animal did {name} keep as a pet?", f"{name} kept a", f" {animal}", ANIMALS),
    ]
    return Person(name, " ".join(sentences), born, questions)
