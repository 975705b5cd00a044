"""The reader's vocabulary: one token a word, so that a prompt can be printed, in classes that the task draws from."""


def _split(words: str) -> list[str]:
    return words.split()


SPECIAL = _split(
    """
    <pad> <s> </s> document . ? about with them it alias count
    """
)
NUMBERS = _split(
    """
    one two three four
    """
)
NAMES = _split(
    """
    Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Leo Maria Nils Olga Paul Quinn Rosa Simon Tessa
    Umar Vera Walter Xenia Yusuf Zoe Adam Berta Carl Dora Emil Fiona Georg Hanna Ivan Julia Konrad Laura Martin Nora
    Oscar Petra Rafael Sofia Thomas Ursula Victor Wanda Xaver Yara Albert Bianca Cyril Daria Edgar Frida Gustav
    Helga Igor Judith Kilian Lydia Moritz Nadia
    """
)
NICKNAMES = _split(
    """
    Ace Bear Chip Dash Echo Flash Ghost Hawk Iron Jet Kit Lucky Moose Nova Otter Pixie Queenie Rusty Scout Tiger
    Viper Wolf Ziggy Buddy
    """
)
RELATIONS = _split(
    """
    colour city job food pet car song sport drink tool shirt stone tree month coin boat
    """
)
SYNONYMS = _split(
    """
    hue town trade dish animal vehicle tune game beverage device garment gem plant season money ship
    """
)
"""The n-th means the same as the n-th relation."""
VALUES = _split(
    """
    acorn anchor apron arrow basil beacon bell bridge butter cabin candle canyon castle cedar clover cloud copper
    coral cotton crystal daisy desert dragon ember feather fern forest fountain garlic ginger glacier harbor hazel
    helmet honey island ivory jasmine kettle ladder lantern lemon marble meadow mirror nectar needle ocean olive
    orchid pebble pepper prairie quartz ribbon saddle silver spider sunset thunder tulip valley velvet willow
    """
)
FILLERS = _split(
    """
    the a of and to in that was for on as at by from this had not are but which who have all were when there been
    more no out so said what up into than some could time only new his may then do first any my now such like our
    over even most made after also did many before must through back years where much your way well
    """
)

WORDS = [*SPECIAL, *NUMBERS, *NAMES, *NICKNAMES, *RELATIONS, *SYNONYMS, *VALUES, *FILLERS]
TOKENS = {word: token for token, word in enumerate(WORDS)}
PAD, BOS, EOS, DOCUMENT, STOP, QUESTION, ABOUT, WITH, THEM, IT, ALIAS, COUNT = range(len(SPECIAL))


def _class(words: list[str]) -> range:
    return range(TOKENS[words[0]], TOKENS[words[-1]] + 1)


NUMBER, NAME, NICKNAME, RELATION, SYNONYM, VALUE, FILLER = map(
    _class, (NUMBERS, NAMES, NICKNAMES, RELATIONS, SYNONYMS, VALUES, FILLERS)
)


def text(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)
