"""Which process of how many this is: every contradiction is refused by name, before anything runs."""

from __future__ import annotations

import pytest

from prestage.wire.channel import AddressError
from prestage.wire.layout import ShardRange
from trainer_worker.engines.errors import EngineConfigError
from trainer_worker.hosts.settings import HostSettings, host_settings
from trainer_worker.hosts.shards import check_shards


def settings(
    num_processes: int | None = 2,
    process_id: int | None = 1,
    coordinator_address: str = "127.0.0.1:8476",
    hosts_address: str = "",
    protected: bool = False,
    insecure: bool = False,
    **environment: str,
) -> HostSettings | None:
    return host_settings(
        num_processes=num_processes,
        process_id=process_id,
        coordinator_address=coordinator_address,
        hosts_address=hosts_address,
        protected=protected,
        insecure=insecure,
        environment=environment,
    )


def test_the_followers_port_is_the_one_after_the_coordinators() -> None:
    found = settings()
    assert found is not None and not found.leads
    assert (found.listen, found.dial) == ("127.0.0.1:8477", "127.0.0.1:8477")
    found = settings(hosts_address="127.0.0.1:99", process_id=0)
    assert found is not None and found.leads and found.dial == "127.0.0.1:99"


def test_a_pod_of_a_job_knows_its_place_from_its_environment() -> None:
    found = settings(
        process_id=None,
        coordinator_address="run-worker-0-0.run:8476",
        protected=True,
        JOB_COMPLETION_INDEX="1",
    )
    assert found is not None
    assert found.processes.process_id == 1
    assert found.dial == "run-worker-0-0.run:8477"
    assert found.listen == "0.0.0.0:8477"


def test_jaxs_own_variables_do_too_and_a_flag_wins() -> None:
    environment = {
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1000",
        "JOB_COMPLETION_INDEX": "2",
    }
    found = settings(None, None, "", **environment)
    assert found is not None
    assert found.processes.num_processes == 4
    assert found.processes.process_id == 3
    assert found.processes.coordinator_address == "127.0.0.1:1000"
    found = settings(2, 0, "127.0.0.1:2000", **environment)
    assert found is not None
    assert (found.processes.num_processes, found.processes.process_id) == (2, 0)
    assert found.dial == "127.0.0.1:2001"


@pytest.mark.parametrize("count", [None, 1])
def test_one_process_is_no_group(count: int | None) -> None:
    assert settings(count, None, "") is None
    assert settings(count, None, "", JOB_COMPLETION_INDEX="0") is None
    assert settings(1, 0, "127.0.0.1:8476") is None


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"process_id": 2}, EngineConfigError, "--process_id is 2: use 0 to 1"),
        ({"process_id": -1}, EngineConfigError, "--process_id is -1"),
        ({"num_processes": 0}, EngineConfigError, "--num_processes is 0"),
        ({"num_processes": -3}, EngineConfigError, "--num_processes is -3"),
        ({"num_processes": None}, EngineConfigError, "--process_id is 1, but --num_processes"),
        (
            {"num_processes": None, "process_id": None},
            EngineConfigError,
            "--coordinator_address is '127.0.0.1:8476', but --num_processes is not set",
        ),
        ({"num_processes": 1}, EngineConfigError, "--process_id is 1, but --num_processes is 1"),
        ({"process_id": None}, EngineConfigError, "nothing says which one"),
        (
            {"process_id": None, "JOB_COMPLETION_INDEX": "one"},
            EngineConfigError,
            "JOB_COMPLETION_INDEX is 'one'",
        ),
        ({"coordinator_address": ""}, EngineConfigError, "--coordinator_address is not set"),
        ({"coordinator_address": "unix:///tmp/x"}, EngineConfigError, "write host:port"),
        ({"coordinator_address": "host"}, AddressError, "--coordinator_address"),
        ({"coordinator_address": "127.0.0.1:65535"}, AddressError, "1 to 65534"),
        ({"coordinator_address": "10.0.0.1:8476"}, AddressError, "give --tls_dir"),
        ({"hosts_address": "10.0.0.1:8476"}, AddressError, "--hosts_address"),
        ({"hosts_address": "nowhere"}, AddressError, "--hosts_address"),
    ],
)
def test_a_contradiction_is_refused_by_name(
    change: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        settings(**change)  # type: ignore[arg-type]


def part(row: int, rows: int, token: int = 0, tokens: int = 1024) -> ShardRange:
    return ShardRange(row_start=row, row_count=rows, token_start=token, token_count=tokens)


def test_parts_make_up_the_micro_batch() -> None:
    check_shards([part(0, 2), part(2, 2)], rows=4, tokens_per_row=1024)
    check_shards([part(0, 4), part(0, 4)], rows=4, tokens_per_row=1024)  # Replicas.
    check_shards(
        [part(0, 2, 0, 512), part(0, 2, 512, 512), part(2, 2, 0, 512), part(2, 2, 512, 512)],
        rows=4,
        tokens_per_row=1024,
    )


@pytest.mark.parametrize(
    "parts",
    [
        [part(0, 2), part(1, 2)],
        [part(0, 2)],
        [part(0, 2), part(3, 1)],
        [part(0, 2), part(2, 3)],
        [part(0, 3), part(2, 2)],
        [part(0, 4), part(0, 0)],
        [part(0, 4, 0, 512), part(0, 4, 0, 512)],
    ],
)
def test_parts_that_overlap_or_leave_a_hole_are_refused(parts: list[ShardRange]) -> None:
    with pytest.raises(ValueError, match="do not make it up"):
        check_shards(parts, rows=4, tokens_per_row=1024)


def test_a_part_that_starts_inside_a_hashed_block_is_refused() -> None:
    with pytest.raises(ValueError, match="inside a block of 128"):
        check_shards([part(0, 4, 0, 500), part(0, 4, 500, 524)], rows=4, tokens_per_row=1024)
