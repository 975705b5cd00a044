"""The example's router: where requests go, by what hubs say and by load, and what happens where something is down."""

import asyncio
import json
from collections import Counter

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from examples.router.app import DOWN_S, MOST_BODY_BYTES, make_app
from examples.router.choice import BOUND, WEIGHT, Loads, choose
from examples.router.scores import Backend

some = st.floats(0, 1e6)


@given(st.lists(st.tuples(some, some), min_size=1, max_size=9), st.integers(1, 10**5), st.floats(1, 1e5))
def test_no_engine_that_is_less_loaded_reuses_more(engines, n_tokens, slack):
    reused, loads = map(list, zip(*engines, strict=True))
    chosen, mean = choose(reused, loads, n_tokens, slack), sum(loads) / len(loads)
    assert loads[chosen] <= BOUND * mean + slack
    assert not [n for n in range(len(loads)) if loads[n] < loads[chosen] and reused[n] > reused[chosen]]


def test_load_is_weighed_against_reuse():
    loads, n_tokens, slack = [105.0, 95.0], 1000, 100.0
    fair = WEIGHT * n_tokens * 10 / 200
    assert choose([fair + 1, 0], loads, n_tokens, slack) == 0 and choose([fair - 1, 0], loads, n_tokens, slack) == 1
    assert choose([n_tokens, 0], [400.0, 0.0], n_tokens, slack) == 1, "far above the mean, nothing is sent there"


def test_loads_count_less_and_less():
    loads = Loads(2, half_life=10.0)
    loads.add(0, 800, now=0.0)
    loads.add(1, 100, now=10.0)
    assert loads.now(10.0) == [400, 100] and loads.now(20.0) == [200, 50]


class Machines:
    """Servers and hubs as the router's client sees them."""

    def __init__(self) -> None:
        self.stored = {name: set() for name in "abc"}
        self.down: set[str] = set()
        self.mute_hubs: set[str] = set()
        self.answered: Counter[str] = Counter()
        self.tokenized = 0
        self.asked: list[dict] = []
        self.apps = {f"engine-{name}": self._engine(name) for name in "abc"}
        self.apps |= {f"hub-{name}": self._hub(name) for name in "abc"}

    def _engine(self, name):
        async def complete(request: Request):
            asked = await request.json()
            self.answered[name] += 1
            self.asked.append({**asked, "authorization": request.headers.get("authorization")})
            self.stored[name] |= set(asked["prompt"] if isinstance(asked["prompt"], list) else ())
            if asked.get("stream"):
                return StreamingResponse(iter([b"data: 1\n\n", b"data: 2\n\n"]), media_type="text/event-stream")
            return JSONResponse({"by": name}, 400 if asked.get("bad") else 200)

        async def tokenize(request: Request):
            self.tokenized += 1
            asked = await request.json()
            return JSONResponse({"tokens": [ord(letter) for letter in asked["prompt"]]})

        async def models(request: Request):
            return JSONResponse({"models": name})

        return Starlette(
            routes=[
                Route("/v1/completions", complete, methods=["POST"]),
                Route("/tokenize", tokenize, methods=["POST"]),
                Route("/v1/models", models),
            ]
        )

    def _hub(self, name):
        async def score(request: Request):
            if name in self.mute_hubs:
                await asyncio.sleep(60)
            asked = await request.json()
            assert request.headers["authorization"] == "Bearer secret"
            found = len(self.stored[name] & set(asked["token_ids"]))
            return JSONResponse({"reused": {"exact": 0, "moved": found}, "in_store": 0})

        return Starlette(routes=[Route("/score", score, methods=["POST"])])

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host in self.down:
            raise httpx.ConnectError("down", request=request)
        return await httpx.ASGITransport(self.apps[request.url.host]).handle_async_request(request)


class Transport(httpx.AsyncBaseTransport):
    def __init__(self, machines):
        self.machines = machines

    async def handle_async_request(self, request):
        return await self.machines.handle_async_request(request)


@pytest.fixture
def machines():
    return Machines()


def posted(machines, *bodies, path="/v1/completions", method="POST", **given):
    """The answers to requests, one after the other."""
    backends = [Backend(f"http://engine-{name}", f"http://hub-{name}") for name in "abc"]
    app = make_app(backends, token="secret", transport=Transport(machines), **given)

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            return [await client.request(method, path, content=body, headers=KEY) for body in map(encoded, bodies)]

    return asyncio.run(run())


KEY = {"Authorization": "Bearer of-the-engine"}


def encoded(body):
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def test_a_prompt_goes_where_most_of_it_is_stored(machines):
    machines.stored |= {"b": set(range(100)), "c": set(range(60))}
    (answer,) = posted(machines, {"prompt": list(range(90)), "cache_salt": "s"})
    assert answer.json() == {"by": "b"}
    assert machines.asked[0]["authorization"] == KEY["Authorization"] and machines.asked[0]["cache_salt"] == "s"


def test_requests_that_share_nothing_are_spread(machines):
    posted(machines, *({"prompt": list(range(n * 1000, n * 1000 + 500))} for n in range(30)))
    assert set(machines.answered.values()) == {10}


def test_text_is_tokenized_once_whatever_the_number_of_hubs(machines):
    machines.stored["c"] = {ord(letter) for letter in "some words"}
    (answer,) = posted(machines, {"prompt": "some words"})
    assert answer.json() == {"by": "c"} and machines.tokenized == 1


def test_answers_are_streamed_and_errors_are_the_engine_s(machines):
    streamed, bad = posted(machines, {"prompt": [1], "stream": True}, {"prompt": [1], "bad": True})
    assert streamed.content == b"data: 1\n\ndata: 2\n\n" and streamed.headers["content-type"].startswith("text/event")
    assert bad.status_code == 400 and "by" in bad.json()


def test_a_hub_that_does_not_answer_costs_a_moment_and_its_score(machines):
    machines.stored |= {"a": set(range(100)), "b": set(range(50))}
    machines.mute_hubs.add("a")
    (answer,) = posted(machines, {"prompt": list(range(90))}, timeout_s=0.05)
    assert answer.json() == {"by": "b"}


def test_an_engine_that_is_down_is_left_out_for_a_while(machines):
    machines.stored["a"] = set(range(100))
    machines.down |= {"engine-a"}
    answers = posted(machines, *[{"prompt": list(range(90))}] * 3)
    assert all(answer.json()["by"] in "bc" for answer in answers) and DOWN_S > 1
    machines.down |= {"engine-b", "engine-c"}
    (nowhere,) = posted(machines, {"prompt": [1]})
    assert nowhere.status_code == 503 and "no engine" in nowhere.json()["error"]["message"]


def test_what_is_no_request_is_refused_here(machines):
    answers = posted(machines, b"not JSON", [1], b" " * (MOST_BODY_BYTES + 1))
    assert [answer.status_code for answer in answers] == [400, 400, 400]
    assert not machines.answered


def test_other_paths_are_answered_by_any_engine(machines):
    (answer,) = posted(machines, b"", path="/v1/models", method="GET")
    assert answer.json()["models"] in "abc"
