"""README's commands, word for word, in a clean environment: ``python -m tests.readme_commands [DIST]``.

What a machine without a GPU can run: the installation, vLLM's server with a small model in place of ``MODEL``, and the
request. Our distributions must come from those of ``make dist``, or of the folder DIST; then the command for a checkout
replaces them. Needs port 8000.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.engines.tiny_model import SHAPE, make_tiny_model
from harness.engines.words import add_tokenizer, numbered

ROOT = Path(__file__).parent.parent
# BlendHub starts in the engine's first steps, which may come later.
UP = ("Application startup complete", "BlendHub: text is reused anywhere")
START_S, STOP_S = 600.0, 60.0
CONFORMANCE = {
    "device cpu": "bit_is_copied or empty",
    "matcher rolling_hash": "refuses",
    "selector attended": "any_moved_spans",
    "store disk": "come_back",
    "transport zmq": "replies or payloads",
}
"""A plugin of each kind, and some tests of its suite, which runs whole in the plugin's own tests."""


def commands() -> tuple[str, str, str]:
    """What installs for CPUs, what starts the server, and what asks it."""
    blocks = re.findall(r"([^\n]*)\n\n```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    (start,) = (block for before, block in blocks if before == "On CPUs:")
    (request,) = (block for _, block in blocks if block.startswith("curl "))
    *install, server = start.splitlines()
    return "\n".join(install), server, request


class Newcomer:
    """Types commands in an empty folder, where an environment is active that has nothing installed."""

    def __init__(self, folder: Path, dist: Path) -> None:
        self.place, self._log, environment = folder / "place", folder / "log", folder / "environment"
        self.place.mkdir()
        self.model = make_tiny_model(folder / "model")
        add_tokenizer(self.model, numbered(SHAPE["vocab_size"]))
        subprocess.run([f"{sys.base_prefix}/bin/python3", "-m", "venv", environment], check=True)
        self._variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._variables["PATH"] = f"{environment}/bin:{os.environ['PATH']}"
        # Python compiles what is imported when it is imported; most of what is installed never is.
        self._variables |= {"PIP_NO_COMPILE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self.published = {"PIP_FIND_LINKS": f"{os.environ.get('PIP_FIND_LINKS', '')} {dist.absolute()}".strip()}
        """With these variables, pip finds our wheels, as if an index had them."""

    def begin(self, command: str, **variables: str) -> "subprocess.Popen[bytes]":
        print(f"$ {command.rstrip()}", flush=True)
        typed = ["bash", "-c", command.replace("MODEL", str(self.model))]
        about: Any = {"cwd": self.place, "env": self._variables | variables, "start_new_session": True}
        with self._log.open("w") as output:
            return subprocess.Popen(typed, stdout=output, stderr=subprocess.STDOUT, **about)

    def run(self, command: str, **variables: str) -> str:
        """What the command prints."""
        assert self.begin(command, **variables).wait() == 0, self.printed()[-5000:]
        return self.printed()

    def printed(self) -> str:
        return self._log.read_text(errors="replace")


def check(newcomer: Newcomer) -> None:
    install, server, request = commands()
    said = newcomer.run(install, **newcomer.published)
    (at_once,) = re.findall(r"^Successfully installed (.*)$", said, re.M)
    ours = {*re.findall(r" (blendhub\S*)-[\d.]+(?= )", f" {at_once} ")}
    taken = {wheel.replace("_", "-") for wheel in re.findall(r"^Processing \S*/(blendhub\w*)-\S+\.whl", said, re.M)}
    assert {"blendhub", "blendhub-cpu"} <= ours <= taken, f"some came from an index: {ours - taken}"
    assert re.search(r" torch-\S+\+cpu ", at_once), f"torch is not the build for CPUs: {at_once}"
    assert "nvidia" not in at_once, f"libraries for GPUs were installed: {at_once}"
    check_server(newcomer, server, request)
    newcomer.run("pip install 'blendhub[testing]'", **newcomer.published)
    for plugin, some in CONFORMANCE.items():
        print(newcomer.run(f"blendhub conformance {plugin} -k '{some}'").strip().splitlines()[-1])
    copy_checkout(newcomer.place)
    in_a_checkout = install.replace("'blendhub[cpu]'", "'.[cpu]' ./plugins/*")
    assert in_a_checkout != install
    newcomer.run(in_a_checkout)
    newcomer.run("blendhub check --only plugins")


def copy_checkout(place: Path) -> None:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listing, cwd=ROOT, text=True).split("\0")[:-1]:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)


def check_server(newcomer: Newcomer, server: str, request: str) -> None:
    said = newcomer.run("blendhub check --only versions")
    assert server.partition(" --kv-transfer-config")[0] in said, f"blendhub check names another command: {said}"
    serving, until = newcomer.begin(server), time.monotonic() + START_S
    try:
        while not all(line in newcomer.printed() for line in UP):
            assert serving.poll() is None and time.monotonic() < until, newcomer.printed()[-5000:]
            time.sleep(0.5)
        # The server's output stays in its own log.
        asked = ["bash", "-c", request.replace("MODEL", str(newcomer.model))]
        answer = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
    finally:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(serving.pid, signal.SIGTERM)
        serving.wait(STOP_S)
    print(answer["kv_transfer_params"])
    assert answer["choices"][0]["text"] and "reason" in answer["kv_transfer_params"]["blendhub"]


if __name__ == "__main__":
    begun = time.monotonic()
    dist = Path(*sys.argv[1:] or ["dist"])
    if not sys.argv[1:]:
        subprocess.run(["make", "--no-print-directory", "dist"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory(prefix="blendhub-readme-") as folder:
        check(Newcomer(Path(folder), dist))
    print(f"README's commands work; that took {time.monotonic() - begun:.0f} s")
