"""The findings as a page: one file without scripts, which loads nothing."""

from collections.abc import Iterable, Sequence
from html import escape

from blendhub.system.served_vllm import server_command
from blendhub.tools.analysis import charts
from blendhub.tools.analysis.findings import Findings, NamedShares, TextFound, advised_arena

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #24292f; --faint: #57606a; --line: #d0d7de; --box: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --ink: #e6edf3; --faint: #adb6c0; --line: #444c56; --box: #161b22 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 60rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { margin: .5rem 0 } .faint { color: var(--faint) }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0 }
.tile { flex: 1 1 9rem; background: var(--box); border: 1px solid var(--line); border-radius: 6px;
  padding: .6rem .9rem }
.tile b { display: block; font-size: 1.7rem; line-height: 1.2 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 0 2rem }
.plot { display: block; width: 100%; height: auto; overflow: visible }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { color: var(--faint); font-weight: 600 } th:first-child, td:first-child, td.text, th.text { text-align: left }
td.text { white-space: normal; min-width: 14rem; overflow-wrap: anywhere }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .75rem; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; user-select: all }
"""


def as_page(found: Findings) -> str:
    body = "\n".join(part for part in _parts(found) if part)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>BlendHub: what could be reused</title>\n<style>{STYLE}{charts.STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _parts(found: Findings) -> Iterable[str]:
    yield f"<h1>{escape(found.verdict)}</h1>"
    yield _about(found)
    yield _tiles(found)
    yield '<div class="plots">'
    yield _plot("How large an arena", charts.curve(found.arenas), _arena_said(found))
    yield _plot("Time to the first token", charts.first_token(found.first_token), _first_token_said(found))
    if found.days:
        yield _plot("By day", charts.days(found.days), "")
    if found.stretches:
        yield _plot("How long the reused stretches are", charts.stretches(found.stretches), "")
    yield "</div>"
    yield _groups(f"By system prompt ({len(found.systems)} of {found.n_systems:,})", found.systems)
    yield _texts(found)
    yield _changes(found)
    yield _broken(found)
    yield f"<h2>To serve such prompts</h2>\n<pre>{escape(server_command(found.config))}</pre>"


def _about(found: Findings) -> str:
    about, shares = found.about, found.shares
    said = [f"{shares.requests:,} prompts with {shares.tokens:,} tokens ({about.tokenizer})"]
    said.append(f"{found.first} to {found.last} UTC" if found.first else "without times")
    if about.interrupted:
        read = "" if about.read_share is None else f" after {about.read_share:.0%} of the files"
        said.append(f"interrupted{read}")
    if about.sample < 1:
        said.append(f"a sample of {about.sample:g} of the lines: reuse across what was left out is not seen")
    return f'<p class="faint">{escape("; ".join(said))}.</p>'


def _tiles(found: Findings) -> str:
    shares = found.shares
    tiles = (
        (f"{shares.prefix:.1%}", "reused as a prefix, by a prefix cache"),
        (f"{shares.exact:.1%}", "reused exactly, by the hub"),
        (f"{shares.anywhere:.1%}", "reused anywhere, by the hub"),
        (f"{found.first_token.mean:.2f} x", "time to the first token, relative to full prefill"),
    )
    inside = "".join(f'<div class="tile"><b>{value}</b>{escape(name)}</div>' for value, name in tiles)
    return f'<div class="tiles">{inside}</div>'


def _plot(title: str, plot: str, said: str) -> str:
    return f'<section><h2>{escape(title)}</h2>\n{plot}\n<p class="faint">{escape(said)}</p></section>'


def _arena_said(found: Findings) -> str:
    advised = advised_arena(found.arenas)
    known = "" if found.about.kv_bytes_known else ", which is assumed: --kv-bytes-per-token says yours"
    return (
        f"{advised.gib:,.4g} GiB, {advised.tokens:,} tokens, reuse {advised.anywhere:.1%}: nearly what the largest "
        f"would. Sizes are for {found.about.kv_bytes / 1024:,.4g} KiB of KV a token{known}. The prefix cache is played "
        "by itself: the hub reuses less exactly where it stores text behind moved text, which is not exact any more."
    )


def _first_token_said(found: Findings) -> str:
    first = found.first_token
    return (
        f"Half of the prompts have at most {first.median:.2f} x, nine of ten at most {first.ninetieth:.2f} x of a full "
        f"prefill's time: {first.costs.sentence()}."
    )


def _groups(title: str, groups: Sequence[NamedShares]) -> str:
    heads = ("", "prompts", "tokens", "prefix", "exact", "anywhere", "first seen", *_text_head(groups))
    rows = [
        (
            one.name,
            f"{one.shares.requests:,}",
            f"{one.shares.tokens:,}",
            f"{one.shares.prefix:.1%}",
            f"{one.shares.exact:.1%}",
            f"{one.shares.anywhere:.1%}",
            one.first_seen,
            *([one.text] if one.text is not None else []),
        )
        for one in groups
    ]
    return _table(title, heads, rows)


def _texts(found: Findings) -> str:
    heads = ("", "tokens", "reuses", "first seen", *_text_head(found.texts))
    rows = [
        (one.id, f"{one.tokens:,}", f"{one.reuses:,}", one.first_seen, *([one.text] if one.text is not None else []))
        for one in found.texts
    ]
    return _table("Texts that are reused most", heads, rows)


def _text_head(rows: Sequence[NamedShares | TextFound]) -> list[str]:
    return ["begins"] if any(row.text is not None for row in rows) else []


def _changes(found: Findings) -> str:
    if not found.changes:
        return ""
    first = found.changes[0]
    rows = [(one.what, f"{one.after:.1%}", f"{100 * (one.after - one.before):+.1f} points") for one in found.changes]
    title = f"Other matchers, on the first {first.tokens:,} tokens, of which {first.before:.1%} are reused now"
    return _table(title, ("", "reused", "change"), rows)


def _broken(found: Findings) -> str:
    broken = found.broken
    if not broken.number:
        return ""
    table = _table(
        f"Lines that could not be played: {broken.number:,}",
        ("", "lines"),
        [(reason, f"{number:,}") for reason, number in broken.reasons.items()],
    )
    named = "\n".join(broken.named)
    return f"{table}\n<p>The first ones:</p>\n<pre>{escape(named)}</pre>"


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th{_kind(name)}>{escape(name)}</th>" for name in heads)
    body = "\n".join(f"<tr>{_cells(heads, row)}</tr>" for row in rows)
    return (
        f"<h2>{escape(title)}</h2>\n"
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


def _cells(heads: Sequence[str], row: Sequence[str]) -> str:
    return "".join(f"<td{_kind(name)}>{escape(cell)}</td>" for name, cell in zip(heads, row, strict=True))


def _kind(name: str) -> str:
    return ' class="text"' if name == "begins" else ""
