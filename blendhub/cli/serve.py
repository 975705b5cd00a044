"""``blendhub serve``: runs a hub until SIGTERM or Ctrl-C."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from blendhub.core.errors import OptionError
from blendhub.framework.host import PluginHost
from blendhub.framework.options import parse_options
from blendhub.hub.config import DEFAULT_TRANSPORT, HubConfig, Listen, StoreChoice, as_toml, load_config
from blendhub.system.default_paths import default_endpoint
from blendhub.system.served_vllm import server_command, transfer_config

if TYPE_CHECKING:
    from blendhub.hub.hub import Hub


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="run a hub",
        description="Run a hub that engines of this machine share, until SIGTERM or Ctrl-C. "
        "Options given here override the file.",
    )
    add = parser.add_argument
    add("--config", metavar="FILE", type=Path, help="hub.toml; --print-config shows all its keys")
    add("--endpoint", metavar="EP", help="listen here only, such as ipc:///PATH/OF/SOCKET")
    add("--arena-gib", metavar="X", type=float, help="shared memory for KV; 0: by the available memory")
    add("--store", metavar="DIR", help="keep KV on disk too, in this directory; with --store-option, a store by name")
    add("--store-option", metavar="KEY=VALUE", action="append", default=[], help="an option of the store; repeatable")
    add("--print-config", action="store_true", help="print the configuration as hub.toml, and exit")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    if arguments.print_config:
        print(as_toml(config), end="")
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not config.listen:
        config = msgspec.structs.replace(config, listen=(Listen(endpoint=default_endpoint()),))
    asyncio.run(_serve(config))
    return 0


def _config(arguments: argparse.Namespace) -> HubConfig:
    config = load_config(arguments.config)
    flags: dict[str, Any] = {}
    if arguments.endpoint is not None:
        flags["listen"] = [{"endpoint": arguments.endpoint}]
    if arguments.arena_gib is not None:
        flags["arena_gib"] = arguments.arena_gib
    if arguments.store is not None or arguments.store_option:
        flags["store"] = _store_choice(arguments.store, arguments.store_option, config.store)
    checked = parse_options("the command line", HubConfig, flags)
    return msgspec.structs.replace(config, **{name: getattr(checked, name) for name in flags})


def _store_choice(store: str | None, options: list[str], of_file: StoreChoice | None) -> dict[str, Any]:
    """The store of the command line. Other options of the same store, from the file, stay."""
    if store == "":
        raise OptionError("--store is empty, expected a directory; is a variable of the command line not set?")
    if options:
        name, own = store or (of_file or StoreChoice()).name, dict(map(_option, options))
    else:
        name, own = "disk", {"path": str(Path(store or "").absolute())}
    return {"name": name, "options": {**(of_file.options if of_file and of_file.name == name else {}), **own}}


def _option(text: str) -> tuple[str, Any]:
    """The value as JSON where it is, such as a number; as text otherwise."""
    name, is_pair, value = text.partition("=")
    if not is_pair or not name:
        raise OptionError(f"--store-option {text!r} should be KEY=VALUE, such as path=/mnt/kv")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


async def _serve(config: HubConfig) -> None:
    from blendhub.hub.hub import Hub
    from blendhub.hub.process_tuning import tune_process

    tune_process()
    stop = asyncio.Event()
    # Before the hub starts, so that a signal during its start removes what it created.
    for number in _stopping_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    host = PluginHost.discover()
    hub = Hub(config, host)
    async with contextlib.AsyncExitStack() as running:
        if not await _done_before(stop, running.enter_async_context(hub)):
            _say("stopped before the hub was up")
            # Python would wait for threads that still load the store's catalogue or compile matchers.
            os._exit(0)
        _say(_screen(hub, host))
        await stop.wait()
        _say("stopping: finishing saves to the store")
    _say("stopped")


async def _done_before(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Wait for the work or for ``stop``; returns whether the work was done. If not, it is cancelled and cleans up."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait((working,))
    if working.cancelled():
        return False
    working.result()
    return True


def _stopping_signals() -> list[signal.Signals]:
    signals = [signal.SIGTERM, signal.SIGINT]
    # Started with nohup, a hub outlives its terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


def _screen(hub: "Hub", host: PluginHost) -> str:
    """What ``blendhub serve`` prints when the hub is up."""
    state, listen = hub.service.state, hub.config.listen[0]
    arena = state.cache.arena
    matchers = [plugin.name for plugin in host.plugins() if plugin.kind == "matcher" and plugin.available]
    models = sorted({index.namespace.model for index in state.indexes})
    rows = [
        *(("endpoint", endpoint) for endpoint in hub.endpoints),
        ("arena", f"{arena.describe()}; /dev/shm/{arena.name.segment}"),
        ("store", _store(hub)),
        ("models", ", ".join(models) or "none yet; engines register them"),
        ("metrics", f"http://{hub.metrics_address}/metrics" if hub.metrics_address else "not served"),
        *([("page", f"http://{hub.metrics_address}/")] if hub.metrics_address else []),
        ("matchers", ", ".join(matchers) or "none; they come with: pip install 'blendhub[hub]'"),
    ]
    settings: dict[str, Any] = {"endpoint": hub.endpoints[0]}
    if listen.transport != DEFAULT_TRANSPORT.name:
        settings["transport"] = {"name": listen.transport}
    shown = "\n".join(f"{name:<10}{value}" for name, value in rows)
    return f"{shown}\n\nserve a model with it:\n\n{server_command(transfer_config(settings))}\n"


def _store(hub: "Hub") -> str:
    store = hub.config.store
    if store is None:
        return "none; evicted KV is lost"
    if hub.service.follower:
        return f"{store.name}, shared with other hubs; /metrics shows the fleet"
    where = store.options.get("path") or "its default directory"
    return f"{store.name} in {where}, {sum(index.n_chunks for index in hub.service.state.indexes)} chunks restored"


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:  # the hub continues when its output is closed
        stop_printing()


def stop_printing() -> None:
    """Discard output from now on: the reader of the pipe is gone, and the interpreter would report that at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
