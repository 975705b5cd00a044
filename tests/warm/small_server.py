"""A server that answers as vLLM's with BlendHub does, over a real hub; a token is a word, and nothing is computed."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from blendhub.core.layout import KVLayout, Namespace, Variant
from blendhub.core.spans import Span
from blendhub.hub.embedded import HubInThread

LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float16", chunk_tokens=64)
BEGIN, END, BETWEEN = 1, 2, 3
LONGEST = 400


class SmallServer(ThreadingHTTPServer):
    """Counts what it is asked. ``has_blendhub``: whether its answers have a report."""

    daemon_threads = True

    def __init__(self, hub: HubInThread, *, longest: int | None = LONGEST, has_blendhub: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.longest, self.has_blendhub = longest, has_blendhub
        self.has_template = True
        self.computed: list[list[int]] = []
        """The prompts of which something was computed and stored."""
        self.asked = self.at_once = self.most_at_once = 0
        """Completions, and how many of them at a time."""
        self.seconds = 0.0
        self.refuses = 0
        """So many completions more are refused, as by a server that is busy."""
        self.dies_after: int | None = None
        self._words: dict[str, int] = {}
        self._lock = threading.Lock()
        self._client = hub.connect()
        self._client.register("an-engine", Namespace(model="a-model", layout=LAYOUT), rank=0)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._client.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def ids(self, text: str) -> list[int]:
        """The tokens of a text: a word each, and one for an empty line."""
        with self._lock:
            return [
                BETWEEN if word == "\0" else self._words.setdefault(word, 100 + len(self._words))
                for word in text.replace("\n\n", " \0 ").split()
            ]

    def tokenize(self, body: dict[str, Any]) -> list[int] | None:
        if "prompt" in body:
            return self.ids(body["prompt"])
        if not self.has_template:
            return None
        said = [[BEGIN, *self.ids(f"{one['role']}: {one['content']}"), END] for one in body["messages"]]
        return [token for message in said for token in message] + [BEGIN, *self.ids("assistant:")]

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.asked += 1
            number = self.asked
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds)
        prompt, asked = body["prompt"], body["kv_transfer_params"]["blendhub"]
        tokens, variant = np.asarray(prompt, np.uint32), Variant(cache_salt=body.get("cache_salt", ""))
        report: dict[str, Any] = {"engine_tokens": 0, "settled_tokens": 0, "moved_tokens": 0}
        with self._lock:
            found = self._client.preview(tokens, variant=variant)
            report["exact_tokens"] = min(found.exact_tokens, len(prompt) - 1)
            if asked.get("store", True):
                reserved = self._client.reserve(tokens, Span(0, len(prompt)), variant)
                if reserved.right:
                    self._client.commit(reserved.right, reserved.span.end)
                    self.computed.append(prompt)
            self.at_once -= 1
        answer: dict[str, Any] = {"id": f"cmpl-{number}", "usage": {"prompt_tokens": len(prompt)}}
        return answer | ({"kv_transfer_params": {"blendhub": report}} if self.has_blendhub else {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SmallServer

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "a-model", "max_model_len": self.server.longest}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        if self.path == "/tokenize":
            tokens = server.tokenize(body)
            if tokens is None:
                self._answer(400, {"error": {"message": "the model has no chat template"}})
            else:
                self._answer(200, {"tokens": tokens})
        elif server.dies_after is not None and server.asked >= server.dies_after:
            self.close_connection = True
        elif server.refuses:
            server.refuses -= 1
            self._answer(503, {"error": {"message": "busy"}})
        elif server.longest and len(body["prompt"]) >= server.longest:
            self._answer(400, {"error": {"message": f"at most {server.longest} tokens"}})
        else:
            self._answer(200, server.complete(body))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        said = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *said: object) -> None:
        pass
