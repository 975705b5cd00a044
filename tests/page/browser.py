"""Debian's Chromium without a window, driven over a pipe by its DevTools protocol."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "remote-debugging-pipe")
ANSWER_S = 120.0


def chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. Every method waits until the browser has answered."""

    def __init__(self, profile: Path) -> None:
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()

        def pipes_at_3_and_4() -> None:
            # Duplicates first: one of them may already be 3 or 4.
            for place, end in enumerate((os.dup(theirs), os.dup(ours)), 3):
                os.dup2(end, place)

        flags = [f"--{flag}" for flag in (*FLAGS, f"user-data-dir={profile}")]
        program = chromium()
        assert program
        self._process = subprocess.Popen(
            [program, *flags, "about:blank"], stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=pipes_at_3_and_4
        )
        os.close(theirs)
        os.close(ours)
        self._read = b""
        self._number = 0
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        """What the page wrote to the console, and exceptions."""
        (page,) = [one for one in self._ask("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self._ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def show(self, url: str, *, width: int = 1000) -> None:
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self._ask("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not self.run(f"Boolean({condition})"):
            text = self.run("document.body?.innerText")
            assert time.monotonic() < deadline, f"{condition} did not become true: {text}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        facts: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": {"Tab": 9, "Enter": 13}[key]}
        self._ask("Input.dispatchKeyEvent", type="keyDown", **facts, text="\r" if key == "Enter" else "")
        self._ask("Input.dispatchKeyEvent", type="keyUp", **facts)

    def write(self, text: str) -> None:
        self._ask("Input.insertText", text=text)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            while b"\0" not in self._read:
                assert select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0], "no answer"
                more = os.read(self._from, 2**20)
                assert more, "the browser has ended"
                self._read += more
            line, _, self._read = self._read.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                self.problems.append(json.dumps(answer["params"]))
