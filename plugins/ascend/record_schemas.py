"""Records the schemas of the operators that the device may use, from the wheels that bring them.

    pip download torch_npu==2.10.0.post4 vllm-ascend==0.23.0 --no-deps
    python plugins/ascend/record_schemas.py torch_npu-*.whl vllm_ascend-*.whl

writes ``blendhub_ascend/schemas.json``. Nothing of the wheels is run: the operators of torch_npu itself stand in a
file of its code generator, those of ATB and of vllm-ascend as text in their libraries.
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

TARGET = Path(__file__).parent / "blendhub_ascend" / "schemas.json"

OPERATORS = (
    "atb::_npu_reshape_and_cache",
    "npu::get_npu_format",
    "npu::npu_gather_pa_kv_cache",
    "npu::npu_scatter_pa_kv_cache",
    "_C_ascend::swap_blocks_batch",
)
SOURCES = {
    r"torch_npu/csrc/aten/npu_native_functions(_by_codegen)?\.yaml": "npu",
    r"torch_npu/lib/libop_plugin_atb\.so": "atb",
    r"vllm_ascend/vllm_ascend_C\..*\.so": "_C_ascend",
}
"""Files of the wheels, and the namespace of the operators in them."""
NAMES = ("Event", "Stream", "current_stream", "get_soc_version", "is_available", "set_device", "stream")
"""Names of ``torch_npu.npu``, which takes them from these files."""
MODULES = ("torch_npu/npu/__init__.py", "torch_npu/npu/_backends.py")
SCHEMA = re.compile(
    rb"(?<![A-Za-z0-9_:.])([A-Za-z_][A-Za-z0-9_]*)(\([^()\x00\n]*(?:\([a-z!]+\)[^()\x00\n]*)*\) -> [^\x00\n]+)"
)


def main(wheels: list[str]) -> int:
    found: dict[str, str] = {}
    names: set[str] = set()
    for wheel in wheels:
        names |= names_in(Path(wheel))
        for name, schema in schemas_in(Path(wheel)):
            if found.setdefault(name, schema) != schema:
                print(f"{name} has two schemas: {found[name]} and {schema}")
                return 1
    missing = sorted((set(OPERATORS) - set(found)) | (set(NAMES) - names))
    if missing:
        print(f"not found in {', '.join(wheels)}: {', '.join(missing)}")
        return 1
    versions = dict(Path(wheel).name.split("-")[:2] for wheel in wheels)
    record = {
        "versions": versions,
        "schemas": {name: found[name] for name in sorted(OPERATORS)},
        "names": sorted(NAMES),
    }
    TARGET.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {TARGET}")
    return 0


def schemas_in(wheel: Path) -> Iterator[tuple[str, str]]:
    """The names and schemas of the operators of ``OPERATORS`` that the wheel brings."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            for pattern, namespace in SOURCES.items():
                if re.fullmatch(pattern, member):
                    for one, rest in SCHEMA.findall(archive.read(member)):
                        name = f"{namespace}::{one.decode()}"
                        if name in OPERATORS:
                            yield name, name + rest.decode().strip()


def names_in(wheel: Path) -> set[str]:
    """The names that the wheel's ``torch_npu.npu`` defines or imports."""
    with zipfile.ZipFile(wheel) as archive:
        sources = [archive.read(one) for one in MODULES if one in archive.namelist()]
    found: set[str] = set()
    for node in (node for source in sources for node in ast.parse(source).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
