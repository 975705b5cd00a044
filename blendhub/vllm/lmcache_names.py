"""The settings of LMCache that people bring along, and what each is called here."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from blendhub.framework.options import did_you_mean

NOT_NEEDED = "not needed here: "
SHARED = 'hub.store here, with the name "shared_directory" or "mooncake"'

LMCACHE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "chunk_size": "chunk_tokens here",
        "local_cpu": f"{NOT_NEEDED}a hub always keeps KV in shared memory",
        "max_local_cpu_size": "hub.arena_gib here",
        "local_disk": 'hub.store here: {"name": "disk", "options": {"path": "DIRECTORY"}}',
        "max_local_disk_size": "capacity_gib here, an option of hub.store",
        "remote_url": SHARED,
        "enable_p2p": SHARED,
        "remote_serde": f"{NOT_NEEDED}KV is stored as it is",
        "use_layerwise": f"{NOT_NEEDED}KV is loaded while other requests go on",
        "save_decode_cache": f"{NOT_NEEDED}KV of answers is stored, too, unless store is false",
        "save_unfull_chunk": f"{NOT_NEEDED}the end of a prompt is stored, too",
        "pre_caching_hash_algorithm": f"{NOT_NEEDED}tokens are compared themselves",
        "enable_blending": f"{NOT_NEEDED}text is blended unless mode says otherwise",
        "blend_special_str": f'{NOT_NEEDED}text is found without it; or an option of the matcher "separator"',
        "blend_recompute_ratios": "recompute_ratio here, one number for all layers",
        "blend_check_layers": 'an option of the selector here: {"name": "hkvd", "options": {"layer": 1}}',
        "blend_thresholds": f"{NOT_NEEDED}recompute_ratio says how many tokens are recomputed, and the selector which",
        "blend_min_tokens": "policy.min_reused_tokens here",
        "min_retrieve_tokens": "policy.min_reused_tokens here",
        "lookup_timeout_ms": "lookup_timeout_s here, in seconds",
        "blocking_timeout_secs": "lookup_timeout_s here",
        "enable_pd": "kv_role here, of two engines that name the same endpoint",
    }
)


def what_was_meant(key: str, valid: Iterable[str]) -> str:
    """A hint for a key that is not valid: what LMCache's setting of this name is called here, or a valid key that is
    close. A variable ``LMCACHE_X`` and a key ``lmcache.x`` of vLLM's extra configuration mean the setting ``x``.
    """
    name = key.lower().removeprefix("lmcache_").removeprefix("lmcache.")
    if meaning := LMCACHE_NAMES.get(name):
        return f" (a setting of LMCache; {meaning})"
    return did_you_mean(key, valid) if name == key.lower() else " (a setting of LMCache; there is none like it here)"
