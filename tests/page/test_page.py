"""The hub's page in Debian's Chromium: what it shows, and with the keyboard alone."""

import re
from collections.abc import Iterator

import numpy as np
import pytest

from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Match, Span
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.outcome.fates import COLOURS, LABELS, Fate
from blendhub.outcome.reasons import Why
from tests.outcomes import outcome
from tests.page.browser import Browser, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(chromium() is None, reason="Chromium is not installed: apt-get install chromium-headless-shell"),
]
NAMESPACE = Namespace(model="m", layout=KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float16"))
SPANS = {
    "exact": [Span(100, 280)],
    "settled": [Span(280, 300)],
    "holes": [Span(300, 340)],
    "moved": [Span(340, 900)],
    "recomputed": [Span(340, 400), Span(600, 624)],
}
SOURCES = [Match(Span(100, 300), 11, 100, True), Match(Span(340, 900), 12, 40, False)]
WHYS = {Why.NOTHING_STORED: [Span(0, 1000)], Why.LAST: [Span(999, 1000)]}
MARKUP = "<img src=x onerror=alert(1)>"
REPORTS = [
    outcome("cmpl-blended", 1000, 100, SPANS, SOURCES, whys=WHYS),
    outcome("cmpl-refused", 500, 0, {}, (), f"nothing is stored {MARKUP}"),
    outcome(f"cmpl-{MARKUP}", 10, 10, {}),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def shown(browser: Browser):
    """The page of a hub with two engines."""
    with HubInThread(HubConfig(arena_gib=0.01)) as hub, hub.connect() as first, hub.connect() as second:
        for client, name in ((first, "engine-a"), (second, "engine-b")):
            client.register(name, NAMESPACE)
        second.report([outcome("chatcmpl-other", 64, 0, {})]).result()
        first.report(REPORTS).result()  # the page begins with the engine that reported last
        first.lookup(np.arange(10, dtype=np.uint32)).result()
        browser.problems.clear()
        browser.show(f"http://{hub.metrics_address}/")
        browser.until("document.querySelectorAll('#requests details').length == 3")
        yield browser


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({selector!r})].map(element => element.textContent)")


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


def test_the_page_shows_numbers_and_the_last_requests_of_an_engine_and_markup_as_text(shown):
    tiles = dict(zip(texts(shown, "#tiles dt"), texts(shown, "#tiles dd"), strict=True))
    assert tiles["sessions, engines"] == "2, 2" and tiles["arena in use"].endswith("10.2 MiB")
    assert tiles["lookups that found something"] == "0%" and re.search(r"\d (us|ms), ", tiles["lookup p50, p99"])
    assert texts(shown, "#requests .name") == [report.request for report in reversed(REPORTS)]
    assert [text.strip() for text in texts(shown, "#legend li")] == list(LABELS.values())
    assert texts(shown, "#count") == ["3 of the last 3 requests of this engine"]
    shown.run("document.querySelectorAll('#requests details').forEach(details => details.open = true)")
    shown.until("document.querySelectorAll('#requests table').length >= 4")
    assert texts(shown, "#requests .reason") == [f"nothing is stored {MARKUP}"]
    assert shown.run("document.querySelectorAll('img').length") == 0
    for kind, names in (("reused", ["cmpl-blended"]), ("none", [f"cmpl-{MARKUP}", "cmpl-refused"])):
        shown.run(f"at('outcome').value = '{kind}'; at('outcome').dispatchEvent(new Event('input'))")
        assert texts(shown, "#requests .name") == names
    shown.run("at('outcome').value = ''; at('outcome').dispatchEvent(new Event('input'))")
    shown.run("at('engine').value = 'engine-b'; at('engine').dispatchEvent(new Event('change'))")
    shown.until("document.querySelectorAll('#requests details').length == 1")
    assert texts(shown, "#requests .name") == ["chatcmpl-other"]
    assert shown.problems == []


def test_a_request_opens_by_the_keyboard_with_a_strip_in_its_colours_its_sources_and_its_reasons(shown):
    reached = []
    for _ in range(5):
        shown.press("Tab")
        reached.append(shown.run("document.activeElement.id || document.activeElement.tagName"))
        width = shown.run("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        assert width >= 2, f"the focus on {reached[-1]} cannot be seen"
        if reached[-1] == "request":
            shown.write("blended")
    assert reached == ["A", "engine", "request", "outcome", "live"]
    assert texts(shown, "#requests .name") == ["cmpl-blended"]
    shown.run("document.querySelector('summary').focus()")
    shown.press("Enter")
    shown.until("document.querySelectorAll('#requests table').length == 3")
    strip = "document.querySelector('details[open] svg.strip')"
    rects = shown.run(
        f"[...{strip}.querySelectorAll('rect:not(.frame)')].map(rect => "
        "[+rect.getAttribute('x'), +rect.getAttribute('width'), getComputedStyle(rect).fill])"
    )
    stretches = REPORTS[0].strip()
    assert rects == [[stretch.span.start, len(stretch.span), rgb(COLOURS[stretch.fate])] for stretch in stretches]
    assert {stretch.fate for stretch in stretches} == set(Fate) and sum(width for _, width, _ in rects) == 1000
    assert shown.run(f"{strip}.getAttribute('aria-label')").startswith(
        "100 in vLLM's own cache; 180 reused exactly; 20 settled, kept; 476 moved, kept; 84 moved, recomputed"
    )
    cells = texts(shown, "#requests .wide:nth-last-child(2) td")
    assert cells == ["100 to 300", "11", "100 to 300", "exact", "340 to 900", "12", "40 to 600", "moved"]
    assert any("the selector chose to recompute" in text for text in texts(shown, "td.why"))
    cells = texts(shown, "#requests details[open] .wide:last-child td")
    nothing, last = Why.NOTHING_STORED.message, Why.LAST.message
    assert cells == ["300 to 340", "40", nothing, "900 to 999", "99", nothing, "999 to 1,000", "1", last]


def test_a_request_that_ends_appears_what_was_open_stays_open_and_a_hub_that_is_gone_is_said(browser: Browser):
    with HubInThread(HubConfig(arena_gib=0.01)) as running, running.connect() as client:
        browser.show(f"http://{running.metrics_address}/", width=360)
        browser.until("document.getElementById('state')?.textContent.startsWith('as of')")
        assert texts(browser, "#count") == ["no request of this engine has ended yet"]
        client.register("engine-c", NAMESPACE)
        client.report(REPORTS[1:2]).result()
        browser.until("document.querySelector('details')")
        browser.run("document.querySelector('details').open = true")
        client.report(REPORTS[:1]).result()
        browser.run("update()")  # as it does every two seconds
        browser.until("document.querySelectorAll('details').length == 2")
        assert browser.run("[...document.querySelectorAll('details')].map(one => one.open)") == [False, True]
        assert browser.run("document.documentElement.scrollWidth") <= 360, "something is cut off on a phone"
    browser.run("update()")
    browser.until("at('state').textContent.startsWith('the hub does not answer')")
