"""What goes wrong between the processes of one trainer."""

from __future__ import annotations

from trainer_worker.engine import EngineError


class HostLost(EngineError):
    """A host of the group is gone, silent or out of step: nothing that it shares can go on."""


class JoinRefused(Exception):
    """A process that is not one of this group; names what differs."""


class OutOfStep(Exception):
    """A follower was given a command that it cannot execute next, and must not guess."""
