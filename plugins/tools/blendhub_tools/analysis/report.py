"""The findings in words, as a terminal shows them."""

from collections.abc import Iterator

from blendhub.system.served_vllm import server_command
from blendhub_tools.analysis.findings import Findings, advised_arena

BAR = 24
WORTH_NAMING = 0.01
"""The share of the tokens behind edits from which on it is named."""


def as_text(findings: Findings) -> str:
    return "\n".join(line for part in (_summary, _arenas, _times, _broken, _end) for line in part(findings))


def _summary(findings: Findings) -> Iterator[str]:
    about, shares, edits = findings.about, findings.shares, findings.edits
    when = f"{findings.first} to {findings.last} UTC" if findings.first else "without times"
    yield f"{shares.requests:,} prompts with {shares.tokens:,} tokens ({about.tokenizer}), {when}"
    if about.interrupted:
        read = "" if about.read_share is None else f" after {about.read_share:.0%} of the files"
        yield f"interrupted{read}: this is what was seen until then"
    yield from ("", findings.verdict, "")
    for name, share in (
        ("as a prefix, by a prefix cache", shares.prefix),
        ("exactly, by the hub", shares.exact),
        ("anywhere, by the hub", shares.anywhere),
    ):
        yield f"  {name:<31} {share:>6.1%} {'#' * round(share * BAR)}".rstrip()
    if edits.behind >= WORTH_NAMING:
        yield ""
        yield (
            f"{edits.behind:.0%} of your tokens stand behind an edit: {edits.requests:,} prompts go on with a "
            "conversation, but not as it was."
        )
        yield f"{edits.moved:.0%} of these tokens move; a prefix cache reuses none of them."


def _arenas(findings: Findings) -> Iterator[str]:
    advised = advised_arena(findings.arenas)
    yield ""
    yield f"{'share reused by size of the arena':<42}{'tokens':>14}  exact  anywhere  first token"
    for arena in findings.arenas:
        name = f"{arena.gib:,.4g} GiB{', advised' if arena is advised else ''}"
        ratio = f"{arena.first_token_ratio:.2f} x"
        yield f"  {name:<40}{arena.tokens:>14,}  {arena.exact:>5.1%}  {arena.anywhere:>8.1%}  {ratio:>11}"
    known = "" if findings.about.kv_bytes_known else ", which is assumed: --kv-bytes-per-token says yours"
    yield (
        f"  {advised.gib:,.4g} GiB, {advised.tokens:,} tokens, reuse {advised.anywhere:.1%}: nearly what the largest "
        f"would. Sizes are for {findings.about.kv_bytes / 1024:,.4g} KiB of KV a token{known}."
    )


def _times(findings: Findings) -> Iterator[str]:
    first = findings.first_token
    yield from ("", "expected time to the first token, relative to full prefill")
    yield (
        f"  prefix cache {first.prefix_cache:.2f} x, BlendHub {first.mean:.2f} x: half of the prompts at most "
        f"{first.median:.2f} x, nine of ten at most {first.ninetieth:.2f} x"
    )
    yield f"  {first.costs.sentence()}"


def _broken(findings: Findings) -> Iterator[str]:
    if findings.broken.number:
        yield from ("", f"lines that could not be played: {findings.broken.number:,}")
        yield from (f"  {number:>9,}  {_plain(reason)}" for reason, number in findings.broken.reasons.items())
        yield "  the first ones:"
        yield from (f"    {_plain(named)}" for named in findings.broken.named)


def _end(findings: Findings) -> Iterator[str]:
    seconds = findings.about.seconds
    speed = findings.shares.tokens / max(seconds.playing, 1e-9) / 1e6
    yield from ("", "to serve such prompts:", "", server_command(findings.config), "")
    yield (
        f"reading took {seconds.reading:.1f} s, tokenising {seconds.tokenising:.1f} s, "
        f"playing {seconds.playing:.1f} s: {speed:.1f} million tokens a second"
    )


def _plain(text: str) -> str:
    """What a log says must not steer the terminal."""
    return "".join(one if one.isprintable() else "?" for one in text)
