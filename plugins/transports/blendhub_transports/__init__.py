"""The transports of BlendHub. This module is what the entry point names; it imports nothing heavy."""

from blendhub.contracts import Transport
from blendhub.framework.hookspecs import PluginSpec, hookimpl
from blendhub_transports.options import TransportOptions


@hookimpl
def blendhub_transports() -> list[PluginSpec[Transport]]:
    return [
        PluginSpec(
            name="zmq",
            api=1,
            summary="requests between processes of one user on one machine, over ZeroMQ and a Unix socket",
            factory="blendhub_transports.zmq_transport:ZmqTransport",
            options=TransportOptions,
        ),
        PluginSpec(
            name="inproc",
            api=1,
            summary="requests within one process, passed by reference",
            factory="blendhub_transports.inproc:InprocTransport",
            options=TransportOptions,
            capabilities=("one_process",),
        ),
    ]
