"""``benchmarks.route``, small: the score of a played hub is what it reuses, and asking finds more than remembering."""

from itertools import islice

from blendhub_tools.analysis.lines import Place
from blendhub_tools.analysis.simulated_hub import SimulatedHub

from benchmarks.route.routers import AskingRouter, PrefixAffineRouter, route
from benchmarks.route.traces import CHUNK, DOCUMENT_TOKENS, Trace
from blendhub.core.layout import DEFAULT_MATCHERS
from blendhub.framework.host import PluginHost

HOST = PluginHost.discover()


def test_a_score_is_what_the_next_prompt_reuses():
    hub = SimulatedHub(HOST, DEFAULT_MATCHERS, [40])
    for kind in (Trace(1).documents(), Trace(1, seed=1).chats()):
        for number, prompt in enumerate(islice(kind, 40)):
            score = hub.score(prompt)
            assert score == hub.score(prompt), "a score changes nothing"
            assert [score] == hub.play(prompt, Place("trace", number)).reused
    hub.check_integrity()


def test_asking_finds_documents_wherever_they_stand():
    n, slots = 4, DOCUMENT_TOKENS // CHUNK
    asking, affine = (
        route(kind, HOST, Trace(n).documents(), 40, n, slots) for kind in (AskingRouter, PrefixAffineRouter)
    )
    assert asking.tokens == affine.tokens and asking.reused > 1.5 * affine.reused
    assert len(asking.loads) == n and sum(asking.loads) == asking.tokens - asking.reused
