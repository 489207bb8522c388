"""What a producer can meet. Every message names the address or name, what happened and the fix.

ProducerError                 the producer takes and sends nothing more
|- RunEnded                   the run has ended: what was not acknowledged was not taken
|- ProducerRefused            the service refuses this producer, and would again
|- ProducerUnreachable        no connection for too long; what was not acknowledged may be durable
`- ProducerClosed             `close` was called
"""

from __future__ import annotations


class ProducerError(Exception):
    """The producer takes and sends nothing more."""


class RunEnded(ProducerError):
    """The run has ended: what was not acknowledged was not taken."""


class ProducerRefused(ProducerError):
    """The service refuses this producer, and would refuse it again."""


class ProducerUnreachable(ProducerError):
    """No connection for too long; what was not acknowledged may be durable or not."""


class ProducerClosed(ProducerError):
    """`close` was called."""
