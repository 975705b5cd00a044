"""The findings in words, as a terminal shows them."""

from collections.abc import Iterator, Sequence

import msgspec

from blendhub.system.served_vllm import server_command
from blendhub_tools.analysis.findings import Findings, NamedShares, TextFound, advised_arena

NAME_WIDTH = 42
BAR = 24
MOST_DAYS = 14
MOST_CHARACTERS = 60
"""Characters of a text that are shown in a terminal."""

WORTH_NAMING = 0.01
"""The share of the tokens behind edits from which on it is named."""

BEGINS = "begins"
"""The head of the column with the beginnings of texts."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    heads: Sequence[str] = ()
    """The heads of the columns behind the first, which has names."""
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    verbatim: str = ""


def as_text(found: Findings) -> str:
    bars = (f"  {name:<31} {share:>6.1%} {'#' * round(share * BAR)}" for name, share in _shares(found))
    seconds = found.about.seconds
    speed = found.shares.tokens / max(seconds.playing, 1e-9) / 1e6
    parts = [
        "\n".join(_about(found)),
        "\n".join([found.verdict, "", *bars, *_edits(found)]),
        *("\n".join(_lines(section)) for section in _sections(found)),
        f"reading took {seconds.reading:.1f} s, tokenising {seconds.tokenising:.1f} s, playing "
        f"{seconds.playing:.1f} s: {speed:.1f} million tokens a second",
    ]
    return "\n\n".join(parts)


def _about(found: Findings) -> list[str]:
    about, shares = found.about, found.shares
    when = f"{found.first} to {found.last} UTC" if found.first else "without times"
    said = [f"{shares.requests:,} prompts with {shares.tokens:,} tokens ({about.tokenizer}), {when}"]
    if about.interrupted:
        read = "" if about.read_share is None else f" after {about.read_share:.0%} of the files"
        said.append(f"interrupted{read}: this is what was seen until then")
    return said


def _shares(found: Findings) -> list[tuple[str, float]]:
    shares = found.shares
    return [
        ("as a prefix, by a prefix cache", shares.prefix),
        ("exactly, by the hub", shares.exact),
        ("anywhere, by the hub", shares.anywhere),
    ]


def _edits(found: Findings) -> list[str]:
    edits = found.edits
    if edits.behind < WORTH_NAMING:
        return []
    return [
        "",
        f"{edits.behind:.0%} of your tokens stand behind an edit: {edits.requests:,} prompts go on with a "
        "conversation, but not as it was.",
        f"{edits.moved:.0%} of these tokens move; a prefix cache reuses none of them.",
    ]


def _sections(found: Findings) -> Iterator[Section]:
    if found.days:
        yield _named("by day", found.days[-MOST_DAYS:])
    if found.systems:
        yield _named(f"by system prompt ({len(found.systems)} of {found.n_systems:,})", found.systems)
    yield _arenas(found)
    yield _first_token(found)
    if found.texts:
        yield _texts(found)
    if broken := found.broken.number:
        rows = [(reason, f"{number:,}") for reason, number in found.broken.reasons.items()]
        named = "\n".join(found.broken.named)
        notes = ["the first ones:"]
        yield Section(
            title=f"lines that could not be played: {broken:,}", heads=["lines"], rows=rows, notes=notes, verbatim=named
        )
    yield Section(title="to serve such prompts", verbatim=server_command(found.config))


def _named(title: str, groups: Sequence[NamedShares]) -> Section:
    rows = []
    for one in groups:
        shares = one.shares
        numbers = (f"{shares.requests:,}", f"{shares.tokens:,}")
        parts = (f"{shares.prefix:.1%}", f"{shares.exact:.1%}", f"{shares.anywhere:.1%}")
        rows.append((one.name, *numbers, *parts, one.first_seen, *_beginning(one)))
    heads = ("prompts", "tokens", "prefix", "exact", "anywhere", "first seen", *_begins(groups))
    return Section(title=title, heads=heads, rows=rows)


def _arenas(found: Findings) -> Section:
    advised = advised_arena(found.arenas)
    known = "" if found.about.kv_bytes_known else ", which is assumed: --kv-bytes-per-token says yours"
    rows = [
        (
            f"{one.gib:,.4g} GiB{', advised' if one is advised else ''}",
            f"{one.tokens:,}",
            *(f"{share:.1%}" for share in (one.exact, one.anywhere)),
            f"{one.first_token_ratio:.2f} x",
        )
        for one in found.arenas
    ]
    return Section(
        title="share reused by size of the arena",
        heads=("tokens", "exact", "anywhere", "first token"),
        rows=rows,
        notes=[
            f"{advised.gib:,.4g} GiB, {advised.tokens:,} tokens, reuse {advised.anywhere:.1%}: nearly what the largest "
            f"would. Sizes are for {found.about.kv_bytes / 1024:,.4g} KiB of KV a token{known}.",
        ],
    )


def _first_token(found: Findings) -> Section:
    first = found.first_token
    notes = [
        f"prefix cache {first.prefix_cache:.2f} x, BlendHub {first.mean:.2f} x: half of the prompts at most "
        f"{first.median:.2f} x, nine of ten at most {first.ninetieth:.2f} x",
        first.costs.sentence(),
    ]
    title = "expected time to the first token, relative to full prefill"
    return Section(title=title, notes=notes)


def _texts(found: Findings) -> Section:
    rows = [(one.id, f"{one.tokens:,}", f"{one.reuses:,}", one.first_seen, *_beginning(one)) for one in found.texts]
    heads = ("tokens", "reuses", "first seen", *_begins(found.texts))
    notes = () if BEGINS in heads else ["(--show-text shows how they begin)"]
    return Section(title="texts that are reused most", heads=heads, rows=rows, notes=notes)


def _begins(rows: Sequence[NamedShares | TextFound]) -> list[str]:
    return [BEGINS] if any(row.text is not None for row in rows) else []


def _beginning(row: NamedShares | TextFound) -> list[str]:
    return [] if row.text is None else [row.text]


def _lines(section: Section) -> Iterator[str]:
    """A section in a terminal: the title stands above the names if it fits there, and before the table otherwise."""
    most = MOST_CHARACTERS if BEGINS in section.heads else None
    rows = [[_short(cell, most) for cell in row] for row in section.rows]
    names = max([NAME_WIDTH, *(len(row[0]) for row in rows)])
    fits = len(section.title) <= names + 2
    if not rows:
        yield f"{section.title}:" if section.verbatim else section.title
    elif not fits:
        yield section.title
    if rows:
        widths = [max(map(len, column)) for column in zip(section.heads, *(row[1:] for row in rows), strict=True)]
        yield _line(section.title if fits else "", names + 2, section.heads, widths)
        for name, *cells in rows:
            yield _line(f"  {name}", names + 2, cells, widths)
    yield from (f"  {note}" for note in section.notes)
    if section.verbatim and not rows:
        yield ""
    yield from (line if not rows else f"    {line}" for line in section.verbatim.splitlines())


def _line(name: str, indent: int, cells: Sequence[str], widths: Sequence[int]) -> str:
    return f"{name:<{indent}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _short(text: str, most: int | None) -> str:
    # What a log says must not steer the terminal.
    line = "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))
    return line if most is None or len(line) <= most else f"{line[: most - 3]}..."
