"""A server that answers as vLLM's with BlendHub does, over a real hub, and trusts only requests that say ``donate``.

A token is a word, and nothing is computed.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from blendhub.core.layout import MIN_DONOR_CONTEXT, KVLayout, Namespace, Variant
from blendhub.core.provenance import Provenance
from blendhub.core.spans import NOWHERE, Span, total
from blendhub.hub.embedded import HubInThread
from blendhub.outcome.reasons import Why

LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float16", chunk_tokens=64)
LONGEST = 1000


class SmallServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: HubInThread) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.has_template = self.has_blendhub = self.has_models = True
        """Whether its model has a chat template, its answers a report, and its list of models is one."""
        self.has_recurrent_layers = False
        """Whether it says of each prompt that may move text that the text is no segment yet."""
        self.computed: list[Any] = []
        """The texts and chats of which something was computed and stored."""
        self.seconds = 0.0
        self.at_once = threading.Semaphore(10)
        """How many completions more may be asked at a time; others are refused, as by a server that is busy."""
        self.refused = 0
        self.dies_after: int | None = None
        """The number of completions that are computed before it answers nothing any more."""
        self._words: dict[str, int] = {}
        self._lock = threading.Lock()
        self._client = hub.connect()
        self._client.register("an-engine", Namespace(model="a-model", layout=LAYOUT), rank=0)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()
        self._client.close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt = body.get("prompt", body.get("messages"))
        if "messages" in body and not self.has_template:
            return 400, {"error": {"message": "the model has no chat template"}}
        tokens = self._tokens(prompt)
        if path == "/tokenize":
            return 200, {"tokens": tokens, "count": len(tokens)}
        if len(tokens) >= LONGEST:
            return 400, {"error": {"message": f"at most {LONGEST} tokens"}}
        if not self.at_once.acquire(blocking=False):
            self.refused += 1
            return 503, {"error": {"message": "busy"}}
        time.sleep(self.seconds)
        with self._lock:
            report = self._complete(prompt, np.asarray(tokens, np.uint32), body)
        self.at_once.release()
        params = {"blendhub": report} if self.has_blendhub else {}
        return 200, {"id": "a", "usage": {"prompt_tokens": len(tokens)}, "kv_transfer_params": params}

    def moves(self, text: str) -> bool:
        """Whether all of a text has a donor."""
        tokens = np.asarray(self._tokens(f"elsewhere {text}"), np.uint32)
        return total(match.span for match in self._client.preview(tokens).result().matches) == len(tokens) - 1

    def _tokens(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            said = [f"<begin> {message['role']}: {message['content']} <end>" for message in prompt]
            prompt = " ".join([*said, "<begin> assistant:"])
        with self._lock:
            return [self._words.setdefault(word, len(self._words)) for word in prompt.replace("\n\n", " | ").split()]

    def _complete(self, prompt: Any, tokens: np.ndarray, body: dict[str, Any]) -> dict[str, Any]:
        variant = Variant(cache_salt=body.get("cache_salt", ""))
        exact = self._client.preview(tokens, variant=variant).result().exact_tokens
        settings = body["kv_transfer_params"]["blendhub"]
        if settings["store"]:
            provenance = Provenance(donates_from=MIN_DONOR_CONTEXT if settings["donate"] else NOWHERE)
            reserved = self._client.reserve(tokens, Span(0, len(tokens)), variant, provenance).result()
            if reserved.right:
                self._client.commit(reserved.right, reserved.span.end).result()
                self.computed.append(prompt)
        report = {"engine_tokens": 0, "exact_tokens": min(exact, len(tokens) - 1)}
        lacks_map = self.has_recurrent_layers and settings.get("mode") != "exact"
        return report | ({"reason": f"80 tokens are not moved: {Why.NO_MAP.message}"} if lacks_map else {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet: the second one would wait until the first is acknowledged
    server: SmallServer

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": "a-model", "max_model_len": LONGEST}]} if self.server.has_models else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.dies_after is not None and len(self.server.computed) >= self.server.dies_after:
            self.close_connection = True
        else:
            self._say(*self.server.answer(self.path, body))

    def _say(self, status: int, body: dict[str, Any]) -> None:
        said = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *said: object) -> None:
        pass
