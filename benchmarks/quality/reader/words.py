"""The reader's vocabulary: one token a word, so that a prompt can be printed, in classes that the task draws from."""

SPECIAL = "<pad> <s> </s> document . ? about with them it alias count"
NUMBERS = "one two three four"
NAMES = (
    "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Leo Maria Nils Olga Paul Quinn Rosa Simon Tessa "
    "Umar Vera Walter Xenia Yusuf Zoe Adam Berta Carl Dora Emil Fiona Georg Hanna Ivan Julia Konrad Laura Martin Nora "
    "Oscar Petra Rafael Sofia Thomas Ursula Victor Wanda Xaver Yara Albert Bianca Cyril Daria Edgar Frida Gustav "
    "Helga Igor Judith Kilian Lydia Moritz Nadia"
)
NICKNAMES = (
    "Ace Bear Chip Dash Echo Flash Ghost Hawk Iron Jet Kit Lucky Moose Nova Otter Pixie Queenie Rusty Scout Tiger "
    "Viper Wolf Ziggy Buddy"
)
RELATIONS = "colour city job food pet car song sport drink tool shirt stone tree month coin boat"
SYNONYMS = "hue town trade dish animal vehicle tune game beverage device garment gem plant season money ship"
"""The n-th means the same as the n-th relation."""
VALUES = (
    "acorn anchor apron arrow basil beacon bell bridge butter cabin candle canyon castle cedar clover cloud copper "
    "coral cotton crystal daisy desert dragon ember feather fern forest fountain garlic ginger glacier harbor hazel "
    "helmet honey island ivory jasmine kettle ladder lantern lemon marble meadow mirror nectar needle ocean olive "
    "orchid pebble pepper prairie quartz ribbon saddle silver spider sunset thunder tulip valley velvet willow"
)
FILLERS = (
    "the a of and to in that was for on as at by from this had not are but which who have all were when there been "
    "more no out so said what up into than some could time only new his may then do first any my now such like our "
    "over even most made after also did many before must through back years where much your way well"
)

WORDS = " ".join([SPECIAL, NUMBERS, NAMES, NICKNAMES, RELATIONS, SYNONYMS, VALUES, FILLERS]).split()
TOKENS = {word: token for token, word in enumerate(WORDS)}
PAD, BOS, EOS, DOCUMENT, STOP, QUESTION, ABOUT, WITH, THEM, IT, ALIAS, COUNT = range(len(SPECIAL.split()))


def _class(words: str) -> range:
    first, *_, last = words.split()
    return range(TOKENS[first], TOKENS[last] + 1)


NUMBER, NAME, NICKNAME, RELATION, SYNONYM, VALUE, FILLER = map(
    _class, (NUMBERS, NAMES, NICKNAMES, RELATIONS, SYNONYMS, VALUES, FILLERS)
)


def text(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)
