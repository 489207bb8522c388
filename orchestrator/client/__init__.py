"""For rollout producers: send trajectories to a running orchestrator, and hear what it wants.

    with RolloutProducer(address, producer="sampler-0", run_id="run") as producer:
        receipt = producer.submit(Rollout(...)).result()

`docs/ingest.md` says what every receipt means.
"""

from orchestrator.client.errors import (
    ProducerClosed,
    ProducerError,
    ProducerRefused,
    ProducerUnreachable,
    RunEnded,
)
from orchestrator.client.producer import RolloutProducer
from orchestrator.client.rollout import (
    Finish,
    Rollout,
    RolloutValueError,
    Segment,
    given,
    sampled,
)
from orchestrator.client.watcher import PolicyUpdate, PolicyWatcher
from orchestrator.ingest.ports import Receipt

__all__ = [
    "Finish",
    "PolicyUpdate",
    "PolicyWatcher",
    "ProducerClosed",
    "ProducerError",
    "ProducerRefused",
    "ProducerUnreachable",
    "Receipt",
    "Rollout",
    "RolloutProducer",
    "RolloutValueError",
    "RunEnded",
    "Segment",
    "given",
    "sampled",
]
