"""Opens many streams and says nothing on any: `python -m tests.security.half_open ADDRESS N METHOD [TLS_DIR [TOKEN]]`.

A process of its own, so that its cost is not the server's. Prints how the streams ended, as JSON.
`N` of kind `sockets` as METHOD are bare TCP connections, which are left open until they are closed.
"""

from __future__ import annotations

import asyncio
import collections
import json
import socket
import sys
from pathlib import Path

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from grpc_status.rpc_status import GRPC_DETAILS_METADATA_KEY

PER_CONNECTION = 100
PATIENCE_S = 60.0


async def one(channel: grpc.aio.Channel, method: str, token: str) -> str:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    call = channel.stream_stream(method)(timeout=PATIENCE_S, metadata=metadata)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        for key, value in error.trailing_metadata() or ():
            if key == GRPC_DETAILS_METADATA_KEY:
                status = status_pb2.Status.FromString(value)
                info = error_details_pb2.ErrorInfo()
                if status.details[0].Unpack(info):
                    return str(info.reason)
        return error.code().name
    return (await call.code()).name


async def streams(address: str, count: int, method: str, tls_dir: str, token: str) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = []
    for _ in range(max(1, count // PER_CONNECTION)):
        if tls_dir:
            folder = Path(tls_dir)
            credentials = grpc.ssl_channel_credentials(
                (folder / "ca.crt").read_bytes(),
                (folder / "tls.key").read_bytes(),
                (folder / "tls.crt").read_bytes(),
            )
            channels.append(grpc.aio.secure_channel(address, credentials, options=options))
        else:
            channels.append(grpc.aio.insecure_channel(address, options=options))
    ends = await asyncio.gather(
        *(one(channels[number % len(channels)], method, token) for number in range(count))
    )
    print(json.dumps(collections.Counter(ends)))
    for channel in channels:
        await channel.close()


def sockets(address: str, count: int) -> None:
    """Connections that never say a word."""
    host, _, port = address.rpartition(":")
    ends: collections.Counter[str] = collections.Counter()
    opened = []
    for _ in range(count):
        try:
            opened.append(socket.create_connection((host, int(port)), timeout=5))
        except OSError as error:
            ends[type(error).__name__] += 1
    for item in opened:
        item.settimeout(PATIENCE_S)
        try:
            while item.recv(4096):
                pass
            ends["closed"] += 1
        except OSError as error:
            ends[type(error).__name__] += 1
    print(json.dumps(ends))


if __name__ == "__main__":
    where, number, what, *rest = sys.argv[1:]
    if what == "sockets":
        sockets(where, int(number))
    else:
        asyncio.run(streams(where, int(number), what, *[*rest, "", ""][:2]))
