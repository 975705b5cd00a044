"""The names of vLLM that the adapter imports, overrides or reads: all versions that it serves with have them.

Sources are read, not imported: those of the vLLM that runs, of vllm-ascend's 0.23, of the newest that is served, and of
each other version in ``build/vllm-VERSION``. What some versions lack is listed here, with who deals with it.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from blendhub.system.served_vllm import TORCH

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

ASCEND_023 = "vllm-ascend-0.23"
BUILD = Path(__file__).parents[3] / "build"
NEWEST = f"vllm-{max(TORCH)}.0"
OTHERS = sorted({path.name for path in BUILD.glob("vllm-0.*.*[0-9]")} - {NEWEST})
ADAPTER = Path(importlib.util.find_spec("blendhub.vllm").origin).parent
CONNECTOR_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
SCHEDULER_OUTPUT = "vllm.v1.core.sched.output"
NOT_IN_023 = {
    # ``Upstream`` imports it, in whose place vllm-ascend has a platform of its own.
    "vllm.v1.worker.block_table.get_block_table_width",
    # Imported where it is returned, which is never called there.
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults",
}
NEWER_METHODS = {
    # Never called there: ``AscendConnector`` finds the manager.
    "bind_kv_cache_manager",
    # Never called there: a step follows as long as blocks are kept for saves.
    "has_pending_push_work",
    # Never called there: ``AscendConnector`` has ``get_finished``, and names the blocks of failed loads.
    "get_transfer_results",
    # Never asked there: a dropped save is no failure.
    "requires_kv_delivery",
    # Not called before 0.33: ``model_check`` refuses to reuse anything where vLLM's KV cache may be unmapped.
    "unregister_kv_caches",
    "restore_kv_caches",
}
READ = {
    f"{SCHEDULER_OUTPUT}.SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
    "total_num_scheduled_tokens preempted_req_ids",
    f"{SCHEDULER_OUTPUT}.CachedRequestData": "req_ids num_computed_tokens new_block_ids resumed_req_ids",
    f"{SCHEDULER_OUTPUT}.NewRequestData": "req_id num_computed_tokens",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "get_block_ids block_pool coordinator",
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": "find_longest_cache_hit",
    "vllm.v1.core.block_pool.BlockPool": "hash_block_size num_gpu_blocks get_num_free_blocks touch",
    "vllm.v1.request.Request": "request_id block_hashes update_block_hashes skip_reading_prefix_cache "
    "kv_transfer_params lora_request cache_salt mm_features prompt_embeds prompt_token_ids pooling_params "
    "num_prompt_tokens num_tokens num_computed_tokens",
}
"""What the adapter reads of the objects that vLLM gives it."""


@pytest.fixture(scope="module")
def newest():
    """The folder of the sources of the newest version."""
    if not (BUILD / NEWEST).exists():
        pytest.skip(f"`make build/{NEWEST} VERSION={NEWEST.removeprefix('vllm-')}` loads 340 MB, and was not called")
    return BUILD / NEWEST


@pytest.fixture(scope="module", params=["running", "0.23", NEWEST, *OTHERS])
def vllm(request):
    """The folder of one version's sources."""
    if request.param == "running":
        return Path(importlib.util.find_spec("vllm").origin).parents[1]
    if request.param in OTHERS:
        return BUILD / request.param
    return request.getfixturevalue("sources_023" if request.param == "0.23" else "newest")


def parsed(folder, module):
    path = folder.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text()) if path.exists() else None


def names_in(body):
    """All names that statements define, under conditions too; of modules that import names on first use, these."""
    found = set()
    for statement in body:
        is_scope = isinstance(statement, ast.ClassDef | ast.FunctionDef)
        for node in [statement] if is_scope else ast.walk(statement):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Dict):
                found |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return found


def imported_by_the_adapter():
    """``(module, name)`` of all that it imports from vLLM; an empty name is the module."""
    for path in ADAPTER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")


def members(folder, module, owner):
    """``{name: parameters}`` of a class; None for what is no method."""
    (found,) = (node for node in parsed(folder, module).body if isinstance(node, ast.ClassDef) and node.name == owner)
    result = {}
    for node in found.body:
        if isinstance(node, ast.FunctionDef):
            result[node.name] = [one.arg for one in node.args.args]
        elif isinstance(node, ast.AnnAssign):
            result[node.target.id] = None
    given = (node for node in ast.walk(found) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr: None for node in given if getattr(node.value, "id", "") == "self"} | result


def test_what_the_adapter_imports_is_there(vllm):
    missing = set()
    for module, name in set(imported_by_the_adapter()):
        tree = parsed(vllm, module)
        is_known = tree is not None and (not name or name in names_in(tree.body))
        if not is_known and parsed(vllm, f"{module}.{name}") is None:
            missing.add(f"{module}.{name}")
    assert missing == (NOT_IN_023 if vllm.name == ASCEND_023 else set())


def test_what_the_connector_overrides_is_called_with_what_it_takes(vllm):
    ours = members(ADAPTER.parents[1], "blendhub.vllm.connector", "BlendHubConnector")
    theirs = members(vllm, CONNECTOR_BASE, "KVConnectorBase_V1") | members(vllm, CONNECTOR_BASE, "SupportsHMA")
    public = {name: takes for name, takes in ours.items() if takes and not name.startswith("_")}
    # Some are younger than others, and vLLM 0.23 has none.
    lacking = public.keys() - theirs.keys()
    assert lacking <= NEWER_METHODS and (vllm.name != ASCEND_023 or lacking == NEWER_METHODS)
    assert {name: theirs[name] for name in public if name in theirs} == {
        name: takes for name, takes in public.items() if name in theirs
    }


@pytest.mark.parametrize("owner", READ)
def test_what_the_adapter_reads_is_there(vllm, owner):
    assert set(READ[owner].split()) <= members(vllm, *owner.rsplit(".", 1)).keys()


def body_of(folder, module, owner, name):
    """The text of a method, without comments."""
    found = next(node for node in parsed(folder, module).body if getattr(node, "name", "") == owner)
    return next(ast.unparse(node) for node in found.body if getattr(node, "name", "") == name)


def test_vllm_tells_the_connector_before_it_unmaps_its_kv_cache_and_after_it_has_mapped_it(newest):
    def called(method):
        body = body_of(newest, "vllm.v1.worker.gpu_worker", "Worker", method)
        return re.findall(r"(unregister_kv_caches|restore_kv_caches|backend\.\w+)\(", body)

    assert called("sleep") == ["unregister_kv_caches", "backend.suspend"]
    assert called("discard") == ["unregister_kv_caches", "backend.discard"]
    assert called("wake_up") == ["backend.resume", "restore_kv_caches"]
    # Tables of rotations are made when vLLM registers the pages: in a pool that sleep keeps, not in that of the pages.
    assert "_maybe_get_memory_pool_context(tag='runtime')" in body_of(
        newest, "vllm.v1.worker.gpu_worker", "Worker", "initialize_from_config"
    )


def test_vllm_takes_all_of_what_was_claimed_or_nothing_where_it_returns_routed_experts(newest):
    connector = "vllm.distributed.aux_output_connector.connector"
    body = body_of(newest, connector, "AuxOutputSchedulerConnector", "cap_external_hit")
    assert {line.strip() for line in body.splitlines() if "return" in line} == {"return num_external", "return 0"}
