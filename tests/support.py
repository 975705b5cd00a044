"""The tables of docs/support.md: what is claimed of versions, models and backends, and what noted results say of it.

A row names the tests that stand for it. Their outcomes come from ``tests/matrix.json``.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from blendhub.system.served_vllm import TESTED, TORCH
from tests.matrix import KEPT, Result, Run, read

NEVER = "**never run**"

Claim = tuple[str, str]
"""What is claimed, and a pattern for the names of the tests that stand for it; empty: there is none."""

ENGINE = "tests/vllm/test_engine_"
MODELS: Mapping[str, Claim] = MappingProxyType(
    {
        "attention with grouped heads (Llama, Qwen, Mistral, ...)": (
            "text anywhere, repaired",
            "equality|models.*(by the|stretched)",
        ),
        "MLA (DeepSeek V2 and V3)": ("text anywhere, repaired", r"models.*one vector|ranks.*latent"),
        "windows (Gemma 3, gpt-oss)": (
            "text anywhere, repaired",
            "models.*window|hybrid.*(gemma3|gpt_oss|every layer)|ranks.*windows",
        ),
        "chunked local attention (Llama 4)": ("text anywhere, repaired", r"models.*\[chunks|hybrid.*chunks of local"),
        "ALiBi (BLOOM)": ("text anywhere, repaired", "models.*ALiBi"),
        "layers that read the KV of others (Gemma 3n)": ("text anywhere, repaired", "models.*KV of another layer"),
        "draft models with their own KV (EAGLE, MTP)": ("text anywhere, repaired", "drafts"),
        "tensor parallelism, two ranks": ("text anywhere, repaired", "ranks.*(two_ranks|same_kv)"),
        "gated delta rules, short convolutions and Mamba 2 beside attention "
        "(Qwen3-Next, Qwen3.5, LFM2, Granite 4, Nemotron 3)": (
            "exact prefixes; with `policy.moves_states` text that two prompts repeat, which is repaired",
            "(recurrent|segments)(?!.*Kimi)",
        ),
        "Kimi delta attention beside MLA (Kimi Linear with plain torch in place of its kernels; of Ling 3 one layer)": (
            "exact prefixes; with `policy.moves_states` text that two prompts repeat, which is repaired",
            "(recurrent|segments).*Kimi",
        ),
        "other recurrent layers beside attention (lightning attention, Mamba 1: Ling 2.5, Jamba)": (
            "exact prefixes",
            "",
        ),
        "keys of an indexer (DeepSeek V3.2, GLM-5): their pages as vLLM's kernel writes them, in Triton's interpreter; "
        "no engine": ("exact prefixes", ""),
        "compressed keys (DeepSeek V4); recurrent layers alone (Mamba)": ("nothing", ""),
        "LoRA adapters": ("exact prefixes", "adapters"),
        "learned positions (OPT)": ("exact prefixes", "models.*learned positions"),
    }
)
BACKENDS: Mapping[str, Claim] = MappingProxyType(
    {
        "`CPU_ATTN`": ("both runners, eager and compiled, two ranks, with real kernels", "equality|models|ranks"),
        "`CPU_MLA`": ("V1, with real kernels", "models.*one vector"),
        "`TRITON_ATTN`": ("V2: its kernels in Triton's interpreter", "runners.*Triton"),
        "`FLEX_ATTENTION`": ("its code, uncompiled", "runners.*FlexAttention"),
        "`FLASH_ATTN`": ("V2: its Python, with plain torch in place of its kernels", "runners.*FlashAttention"),
        "`FLASHINFER`": (
            "both runners: its Python, with plain torch in place of its kernels",
            "runners.*(FlashInfer|one_token)",
        ),
        "`CPU_ATTN` with AMX, `FLASHMLA`, `FLASH_ATTN_MLA`, `FLASHINFER_MLA`, `TRITON_MLA`, `TOKENSPEED_MLA`": (
            "the metadata of their builders, or the kernel that writes their pages; no engine",
            "",
        ),
        "`CUTLASS_MLA`, `TRITON_FLASH_ATTN`, `TRITON_FLASHINFER`": ("not at all", ""),
    }
)


def runs_on(device_is_cpu: bool, runs: Sequence[Run], vllm: str = "") -> list[Run]:
    """The runs on CPUs, or those on anything else; of one minor version, or of all."""
    return [run for run in runs if (run.device == "CPU") == device_is_cpu and run.vllm.startswith(vllm)]


def summary(results: Iterable[Result]) -> str:
    """How many tests ended how, and when, as a cell of a table."""
    known = list(results)
    if not known:
        return NEVER
    counts = Counter(result.outcome for result in known)
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome])
    days = sorted({result.on.isoformat() for result in known})
    said = f"{said}; {' to '.join({days[0]: 0, days[-1]: 0})}"
    return f"**{said}**" if counts["failed"] else said


def named(pattern: str, runs: Iterable[Run]) -> list[Result]:
    """The results of the tests that a pattern names."""
    if not pattern:
        return []
    wanted = re.compile(f"{ENGINE}({pattern})")
    return [result for run in runs for name, result in run.tests.items() if wanted.match(name)]


def rows_of_versions(_: list[str]) -> list[str]:
    rows, runs = [], read(KEPT)
    for version, torch in TORCH.items():
        here = runs_on(True, runs, f"{version}.")
        how = f"torch {here[0].torch}; compiled parts {here[0].compiled}" if here else ""
        cells = [
            version,
            torch,
            how,
            *(
                summary(r for run in part for r in run.tests.values())
                for part in (here, runs_on(False, runs, f"{version}."))
            ),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def rows_of_claims(claims: Mapping[str, Claim], _: list[str]) -> list[str]:
    """A row for each claim, with the results of the version on which all tests run."""
    runs = read(KEPT)
    on_cpus, on_hardware = (runs_on(is_cpu, runs, f"{TESTED}.") for is_cpu in (True, False))
    return [
        f"| {name} | {claim} | {summary(named(pattern, on_cpus))} | {summary(named(pattern, on_hardware))} |"
        for name, (claim, pattern) in claims.items()
    ]
