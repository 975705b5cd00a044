"""The findings in words, as a terminal shows them."""

from collections.abc import Iterator

from blendhub.system.served_vllm import server_command
from blendhub_tools.analysis.findings import EXACT_COST, MOVED_COST, Findings

BAR = 24


def as_text(findings: Findings) -> str:
    return "\n".join(line for part in (_summary, _arenas, _broken) for line in part(findings))


def _summary(findings: Findings) -> Iterator[str]:
    yield f"{findings.prompts:,} prompts with {findings.tokens:,} tokens ({findings.tokenizer})"
    if findings.interrupted:
        yield "interrupted: this is what was seen until then"
    yield from ("", findings.verdict, "")
    for name, share in (
        ("as a prefix, by a prefix cache", findings.prefix),
        ("exactly, by the hub", findings.exact),
        ("anywhere, by the hub", findings.anywhere),
    ):
        yield f"  {name:<31} {share:>6.1%} {'#' * round(share * BAR)}".rstrip()


def _arenas(findings: Findings) -> Iterator[str]:
    advised = findings.advised
    yield ""
    yield f"{'share reused by size of the arena':<34}{'tokens':>12}  exact  anywhere  first token"
    for arena in findings.arenas:
        name = f"{arena.gib:,.4g} GiB{', advised' if arena == advised else ''}"
        ratio = f"{arena.first_token:.2f} x"
        yield f"  {name:<32}{arena.tokens:>12,}  {arena.exact:>5.1%}  {arena.anywhere:>8.1%}  {ratio:>11}"
    assumed = ", which is assumed: --kv-bytes-per-token says yours" if findings.kv_bytes_assumed else ""
    yield f"  Sizes are for {findings.kv_bytes / 1024:,.4g} KiB of KV a token{assumed}."
    yield (
        f"  First token: the time relative to full prefill, {1 - findings.prefix:.2f} x with a prefix cache. An exact "
        f"token costs {EXACT_COST:.0%} of a computed one, a moved one {MOVED_COST:.0%}, as with a small model on CPUs."
    )
    yield from ("", "to serve such prompts:", "", server_command(findings.config))


def _broken(findings: Findings) -> Iterator[str]:
    if findings.broken:
        yield from ("", f"lines that could not be played: {sum(findings.broken.values()):,}")
        yield from (f"  {number:>9,}  {_plain(reason)}" for reason, number in findings.broken.items())
        yield "  the first ones:"
        yield from (f"    {_plain(line)}" for line in findings.first_broken)


def _plain(text: str) -> str:
    """What a log says must not steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
