"""Fixtures of the tests of operation."""

from __future__ import annotations

import pytest

from tests.operation.process import flags, result_of, running, train, worker
from tests.support.rig import socket_folder


@pytest.fixture(scope="session", name="trained")
def _trained() -> object:
    """The digest of the recorded rollouts' undisturbed run."""
    with socket_folder() as folder, worker(folder, *flags(folder, "--timed_fwd_bwd_s=0.01")):
        with running(folder / "o.log", *train(folder)) as process:
            assert process.wait() == 0, process.output
        return result_of(folder / "result.json")["parameter_digest"]
