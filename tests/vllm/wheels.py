"""vLLM's Python out of wheels that are built for an accelerator: what is compiled in them needs one, or another torch.

``python -m tests.vllm.wheels VERSION FOLDER`` makes a version of vLLM that has no build for CPUs: its Python, with what
the installed build has compiled.
"""

import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path


def unpack(wanted: list[str], folder: Path) -> None:
    """Load these wheels from the package index, and unpack their Python. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as place:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*download, "--dest", place, *wanted], capture_output=True, text=True, check=True)
        for wheel in Path(place).glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                # Without ``.dist-info``, from which vLLM would take this machine for one with the accelerator.
                names = [name for name in packed.namelist() if ".dist-info/" not in name]
                packed.extractall(folder, [name for name in names if name.endswith((".py", ".json"))])


def main(version: str, folder: Path) -> None:
    unpack([f"vllm=={version}"], folder)
    new = ["orjson"]  # what older versions do not need
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *new], check=True)
    for compiled in Path(find_spec("vllm").origin).parent.glob("*.so"):
        (folder / "vllm" / compiled.name).symlink_to(compiled)
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
