"""The transports of BlendHub. This module is what the entry point names; it imports nothing heavy."""

from blendhub.contracts import Transport
from blendhub.framework.hookspecs import PluginSpec, Unavailable, hookimpl
from blendhub_transports.options import InprocOptions, ZmqOptions


def _needs_zmq() -> Unavailable | None:
    from importlib.util import find_spec

    if find_spec("zmq"):
        return None
    return Unavailable("pyzmq is not installed", "pip install 'pyzmq>=26'")


@hookimpl
def blendhub_transports() -> list[PluginSpec[Transport]]:
    return [
        PluginSpec(
            name="inproc",
            api=5,
            summary="requests within one process, passed by reference",
            factory="blendhub_transports.inproc:InprocTransport",
            options=InprocOptions,
            capabilities=("one_process",),
        ),
        PluginSpec(
            name="zmq",
            api=5,
            summary="requests between processes of one machine, or between machines with keys",
            factory="blendhub_transports.zmq_transport:ZmqTransport",
            options=ZmqOptions,
            probe=_needs_zmq,
        ),
    ]
