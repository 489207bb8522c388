"""The newest facts for samplers: one writer, any number of waiting readers, no queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What samplers are told. `change` counts up with every change."""

    change: int = 0
    policy_version: int = 0  # Updates applied to the weights that are offered for sampling.
    finished: bool = False


class PolicyBoard:
    """Holds the newest state; readers that are slow miss what was between."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._state = PolicyState()

    @property
    def state(self) -> PolicyState:
        with self._cond:
            return self._state

    def publish(self, policy_version: int) -> None:
        """Offer weights of this version. A lower one is told too: a restored run goes back."""
        with self._cond:
            if policy_version != self._state.policy_version and not self._state.finished:
                self._change(replace(self._state, policy_version=policy_version))

    def finish(self) -> None:
        """The run has ended: nothing more is taken."""
        with self._cond:
            if not self._state.finished:
                self._change(replace(self._state, finished=True))

    def nudge(self) -> None:
        """Wake the readers, to look at what else may concern them."""
        with self._cond:
            self._cond.notify_all()

    def wait(
        self, change: int, timeout_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> PolicyState:
        """The state once it is not `change` any more, or after the timeout."""
        with self._cond:
            self._cond.wait_for(lambda: self._state.change != change or stopped(), timeout_s)
            return self._state

    def _change(self, state: PolicyState) -> None:
        self._state = replace(state, change=self._state.change + 1)
        self._cond.notify_all()
