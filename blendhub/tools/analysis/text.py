"""The findings in a terminal."""

from collections.abc import Iterator, Sequence

from blendhub.system.served_vllm import server_command
from blendhub.tools.analysis.findings import Findings, NamedShares, advised_arena

MOST_DAYS = 14
BAR = 24
SHORT = 60
"""Characters of a text that are shown."""


def as_text(found: Findings) -> str:
    sections = [
        _log(found),
        _verdict(found),
        _named("by day", found.days[-MOST_DAYS:]),
        _named(f"by system prompt ({len(found.systems)} of {found.n_systems:,})", found.systems),
        _stretches(found),
        _curve(found),
        _first_token(found),
        _texts(found),
        _changes(found),
        _broken(found),
        _config(found),
        _speed(found),
    ]
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _log(found: Findings) -> Iterator[str]:
    about, shares = found.about, found.shares
    when = f", {found.first} to {found.last} UTC" if found.first else ", without times"
    yield f"{shares.requests:,} prompts with {shares.tokens:,} tokens ({about.tokenizer}){when}"
    if about.interrupted:
        read = "" if about.read_share is None else f" after {about.read_share:.0%} of the files"
        yield f"interrupted{read}: this is what was seen until then"
    if about.sample < 1:
        yield f"a sample of {about.sample:g} of the lines: reuse across what was left out is not seen"
    if about.late:
        yield f"{about.late:,} prompts stand in their logs far behind later ones, and were played there"


def _verdict(found: Findings) -> Iterator[str]:
    yield found.verdict
    yield ""
    shares = found.shares
    for name, share in (
        ("as a prefix, by a prefix cache", shares.prefix),
        ("exactly, by the hub", shares.exact),
        ("anywhere, by the hub", shares.anywhere),
    ):
        yield f"  {name:<31} {share:>6.1%} {'#' * round(share * BAR)}"


def _named(title: str, groups: Sequence[NamedShares]) -> Iterator[str]:
    if not groups:
        return
    yield f"{title:<44} {'prompts':>9} {'tokens':>13} {'prefix':>7} {'exact':>7} {'anywhere':>8}"
    for group in groups:
        shares = group.shares
        name = f"{group.name}  {_short(group.text, 32) if group.text else ''}".rstrip()
        yield (
            f"  {name:<42} {shares.requests:>9,} {shares.tokens:>13,} {shares.prefix:>7.1%} {shares.exact:>7.1%} "
            f"{shares.anywhere:>8.1%}"
        )


def _stretches(found: Findings) -> Iterator[str]:
    if not found.stretches:
        return
    total = sum(one.tokens for one in found.stretches)
    yield f"{'length of the reused stretches':<44} {'number':>9} {'share of what is reused':>24}"
    for one in found.stretches:
        share, name = one.tokens / total, f"{one.least:,} to {one.most:,} tokens"
        yield f"  {name:<42} {one.number:>9,} {share:>7.1%} {'#' * round(share * BAR)}"


def _curve(found: Findings) -> Iterator[str]:
    known = "" if found.about.kv_bytes_known else ", assumed: name yours with --kv-bytes-per-token"
    yield f"share reused by size of the arena, at {found.about.kv_bytes / 1024:,.4g} KiB of KV a token{known}"
    yield f"  {'GiB':>9} {'tokens':>12} {'prefix':>7} {'exact':>7} {'anywhere':>8} {'first token':>11}"
    advised = advised_arena(found.arenas)
    for one in found.arenas:
        mark = " <- advised" if one is advised else ""
        yield (
            f"  {one.gib:>9,.4g} {one.tokens:>12,} {one.prefix:>7.1%} {one.exact:>7.1%} {one.anywhere:>8.1%} "
            f"{one.first_token_ratio:>9.2f} x{mark}"
        )


def _first_token(found: Findings) -> Iterator[str]:
    first = found.first_token
    yield "expected time to the first token, relative to full prefill"
    yield f"  ({first.costs.sentence()})"
    yield (
        f"  prefix cache {first.prefix_cache:.2f} x, BlendHub {first.mean:.2f} x: half of the prompts at most "
        f"{first.median:.2f} x, nine of ten at most {first.ninetieth:.2f} x"
    )
    if first.full_ms is not None:
        yield (
            f"  on average {first.full_ms:,.0f} ms for a full prefill, {first.prefix_cache_ms:,.0f} ms with a prefix "
            f"cache, {first.mean_ms:,.0f} ms with BlendHub"
        )


def _texts(found: Findings) -> Iterator[str]:
    if not found.texts:
        return
    yield f"{'texts that are reused most':<44} {'tokens':>9} {'reuses':>13}  first seen"
    for one in found.texts:
        yield f"  {one.id:<42} {one.tokens:>9,} {one.reuses:>13,}  {one.first_seen}"
        if one.text:
            yield f"    {_short(one.text, SHORT)}"
    if all(one.text is None for one in found.texts):
        yield "  (--show-text shows how they begin)"


def _changes(found: Findings) -> Iterator[str]:
    if not found.changes:
        return
    first = found.changes[0]
    yield f"other matchers, tried on the first {first.tokens:,} tokens, of which {first.before:.1%} are reused now"
    for one in found.changes:
        yield f"  {one.what}: {one.after:.1%}, {100 * (one.after - one.before):+.1f} points"
    if not any(one.separates for one in found.changes):
        yield "  no token stands before many of the reused stretches; --separator TEXT tries one that you know"


def _broken(found: Findings) -> Iterator[str]:
    broken = found.broken
    if not broken.number:
        return
    yield f"lines that could not be played: {broken.number:,}"
    for reason, number in broken.reasons.items():
        yield f"  {number:>9,}  {reason}"
    yield "  the first ones:"
    for named in broken.named:
        yield f"    {named}"


def _config(found: Findings) -> Iterator[str]:
    yield "to serve such prompts:"
    yield ""
    yield server_command(found.config)


def _speed(found: Findings) -> Iterator[str]:
    seconds = found.about.seconds
    speed = found.shares.tokens / max(seconds["playing"], 1e-9) / 1e6
    yield (
        f"reading took {seconds['reading']:.1f} s, tokenising {seconds['tokenising']:.1f} s, playing "
        f"{seconds['playing']:.1f} s: {speed:.1f} million tokens a second"
    )


def _short(text: str, most: int) -> str:
    line = " ".join(text.split())
    # What a log says must not steer the terminal.
    line = "".join(one if one.isprintable() else "?" for one in line)
    return line if len(line) <= most else f"{line[: most - 3]}..."
