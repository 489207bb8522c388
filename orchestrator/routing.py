"""Router replay and the drop audit: what they ask of the worker and of the rollouts, before a start.

Compares what flags want with what the worker can; talks to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from orchestrator.trajectory import TrajectoryLimits
from prestage.trainer.v1 import trainer_pb2 as pb

FIELD: Final = "routed_experts"


class RoutingUnusable(ValueError):
    """The worker cannot do what a flag asks; names the flag and the fix."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Experts that rollouts recorded, of the worker's model: `[tokens, moe_layers, top_k]` a row."""

    moe_layers: int  # Layers with experts; dense ones do not count.
    top_k: int
    num_experts: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.moe_layers, self.top_k)


def resolve_routing(router_replay: bool, able: pb.GetCapabilitiesResponse) -> Routing | None:
    """What `--router_replay` replays; None without it. Raises `RoutingUnusable`."""
    if not router_replay:
        return None
    if FIELD not in able.optional_fields or not able.moe_layers:
        raise RoutingUnusable(
            f"--router_replay is set, but the worker's engine {able.engine!r} has no model with"
            " experts that it can replay routing in: leave it out, or give the worker a MoE model"
        )
    return Routing(moe_layers=able.moe_layers, top_k=able.top_k, num_experts=able.num_experts)


def check_drop_audit(required: bool, able: pb.GetCapabilitiesResponse) -> None:
    """`--require_drop_audit`. Raises `RoutingUnusable` when the worker would not say what it dropped."""
    if required and not able.reports_drop_audit:
        raise RoutingUnusable(
            f"--require_drop_audit is set, but the worker's engine {able.engine!r} does not report"
            " the assignments that its MoE buffers dropped: use an engine that does, or leave the"
            " flag out of a run that is not scored"
        )


def routed(limits: TrajectoryLimits, routing: Routing | None) -> TrajectoryLimits:
    """`limits` of a run in which every trajectory must bring its routing, or none may."""
    if routing is None:
        return limits
    return replace(
        limits,
        required_fields=(*(limits.required_fields or ()), FIELD),
        moe_layers=routing.moe_layers,
        top_k=routing.top_k,
        num_experts=routing.num_experts or None,
    )
