"""Opens many streams and says nothing on any of them: `python -m tests.ingest.half_open ADDRESS N`.

A process of its own, so that its cost is not the service's. Prints how the streams ended, as JSON.
"""

from __future__ import annotations

import asyncio
import collections
import json
import sys

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from grpc_status.rpc_status import GRPC_DETAILS_METADATA_KEY

METHOD = "/prestage.rollout.v1.RolloutIngest/SubmitTrajectories"
PER_CONNECTION = 100


async def one(channel: grpc.aio.Channel) -> str:
    call = channel.stream_stream(METHOD)(timeout=120)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        for key, value in error.trailing_metadata() or ():
            if key == GRPC_DETAILS_METADATA_KEY:
                status = status_pb2.Status.FromString(value)
                info = error_details_pb2.ErrorInfo()
                if status.details[0].Unpack(info):
                    return str(info.reason)
        return f"{error.code().name}: {error.details()}"
    return (await call.code()).name


async def main(address: str, count: int) -> None:
    channels = [
        grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(max(1, count // PER_CONNECTION))
    ]
    ends = await asyncio.gather(*(one(channels[n % len(channels)]) for n in range(count)))
    print(json.dumps(collections.Counter(ends)))
    for channel in channels:
        await channel.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
