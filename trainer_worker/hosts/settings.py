"""Which process of how many this is: from flags, else from what a job sets in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prestage.wire.channel import AddressError, check_address, is_local, unix_path
from prestage.wire.security import check_reachable
from trainer_worker.engines.errors import EngineConfigError
from trainer_worker.engines.processes import Processes

ENV_COUNT: Final = "JAX_NUM_PROCESSES"
ENV_ADDRESS: Final = "JAX_COORDINATOR_ADDRESS"
ENV_IDS: Final = ("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX")
"""The second one is Kubernetes' own, in every pod of an Indexed job (JobSet makes such jobs)."""
MAX_PROCESSES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """One process of a group of at least two."""

    processes: Processes
    listen: str  # Where the leader serves its group.
    dial: str  # Where a follower reaches it.

    @property
    def leads(self) -> bool:
        return self.processes.process_id == 0


def host_settings(
    *,
    num_processes: int | None,
    process_id: int | None,
    coordinator_address: str,
    hosts_address: str,
    protected: bool,
    insecure: bool,
    environment: Mapping[str, str],
) -> HostSettings | None:
    """None for a trainer of one process. A flag that is set wins over the environment.

    `protected`: the processes show each other certificates. Raises `EngineConfigError` and `AddressError`, naming what is missing or wrong.
    """
    count = num_processes if num_processes is not None else _whole(environment, ENV_COUNT)
    address = coordinator_address or environment.get(ENV_ADDRESS, "")
    if count is None or count == 1:
        if process_id is not None and process_id != 0:
            raise EngineConfigError(
                f"--process_id is {process_id}, but --num_processes is {count or 'not set'}"
            )
        if count is None and coordinator_address:
            raise EngineConfigError(
                f"--coordinator_address is {coordinator_address!r}, but --num_processes is not set"
            )
        return None
    if not 1 < count <= MAX_PROCESSES:
        raise EngineConfigError(f"--num_processes is {count}: use 1 to {MAX_PROCESSES}")
    who = process_id
    for name in ENV_IDS:
        who = who if who is not None else _whole(environment, name)
    if who is None:
        raise EngineConfigError(
            f"--num_processes is {count}, but nothing says which one this is: set --process_id, or"
            f" one of {', '.join(ENV_IDS)}"
        )
    if not 0 <= who < count:
        raise EngineConfigError(f"--process_id is {who}: use 0 to {count - 1}")
    if not address:
        raise EngineConfigError(
            f"--num_processes is {count}, but --coordinator_address is not set: give host:port of"
            " process 0"
        )
    if unix_path(address) is not None:
        raise EngineConfigError(f"--coordinator_address is {address!r}: write host:port")
    check_address("--coordinator_address", address)
    host, _, port = address.rpartition(":")
    if not 0 < int(port) < 65535:
        raise AddressError(f"--coordinator_address is {address!r}: use a port from 1 to 65534")
    dial = hosts_address or f"{host}:{int(port) + 1}"
    check_address("--hosts_address", dial)
    check_reachable("--hosts_address", dial, protected=protected, insecure=insecure)
    check_reachable("--coordinator_address", address, protected=protected, insecure=insecure)
    local = is_local(dial)
    return HostSettings(
        processes=Processes(num_processes=count, process_id=who, coordinator_address=address),
        listen=dial if local else f"0.0.0.0:{dial.rpartition(':')[2]}",
        dial=dial,
    )


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise EngineConfigError(f"{name} is {text!r} in the environment: write a whole number")
    return int(text)
