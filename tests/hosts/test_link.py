"""The group's own connection: who may join, and over what."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from prestage.hosts.v1 import hosts_pb2 as pb
from prestage.wire.channel import AddressError
from prestage.wire.layout import ShardRange
from prestage.wire.security import Security, SecurityConfig
from prestage.wire.stream_plane import shard_to_proto
from tests.hosts.processes import two_free_ports
from tests.hosts.rig import FIELDS, SPEC, batch
from tests.security.authority import Authority, token_folder
from trainer_worker.hosts.errors import HostLost, JoinRefused, OutOfStep
from trainer_worker.hosts.group import HostGroup
from trainer_worker.hosts.link import FollowerLink, LeaderServer
from trainer_worker.hosts.shards import Offers, ShardKeeper

HELLO = pb.Hello(process_id=1, num_processes=2)


@contextlib.contextmanager
def leader(security: Security) -> Iterator[tuple[HostGroup, Offers, str]]:
    group = HostGroup(num_processes=2, incarnation="group", settings={})
    offers = Offers()
    address = f"127.0.0.1:{two_free_ports()}"
    server = LeaderServer(group, offers, address, security.guard())
    server.start()
    try:
        yield group, offers, address
    finally:
        server.stop(0.1)


def secured(folder: Path, authority: Authority, name: str) -> SecurityConfig:
    return SecurityConfig(tls_dir=authority.folder(folder / name), token_dir=folder / "tokens")


def test_a_host_joins_over_mtls_with_the_role_drive_and_no_other_way(tmp_path: Path) -> None:
    authority, stranger = Authority(), Authority("another")
    token_folder(tmp_path / "tokens")
    token_folder(tmp_path / "others")
    with leader(Security(secured(tmp_path, authority, "leader"))) as (group, _, address):
        for config, error in (
            (SecurityConfig(), AddressError),
            (secured(tmp_path, stranger, "stranger"), AddressError),
            (
                SecurityConfig(
                    tls_dir=authority.folder(tmp_path / "wrong"), token_dir=tmp_path / "others"
                ),
                JoinRefused,
            ),
        ):
            with pytest.raises(error):
                FollowerLink(address, Security(config)).join(HELLO, 2.0)
        assert not group.lost.done()
        link = FollowerLink(address, Security(secured(tmp_path, authority, "host")))
        link.join(HELLO, 10.0)
        assert link.incarnation == "group"


def test_a_part_comes_over_the_link_and_only_while_it_is_on_offer() -> None:
    with leader(Security()) as (_, offers, address):
        link = FollowerLink(address, Security())
        link.join(HELLO, 10.0)
        whole = batch(0, 0)
        rows = SPEC.rows // 2
        halves = [
            ShardRange(row_start=first, row_count=rows, token_start=0, token_count=64)
            for first in (0, rows)
        ]
        keeper = ShardKeeper(1 << 24, link.fetch)
        ref = offers.offer(whole, halves)
        hold = pb.Hold(batch=ref, shard=shard_to_proto(halves[1]))
        held = keeper.hold(hold)
        assert held.error == "" and held.received_bytes > 0
        part = keeper.get(ref)
        assert part.rows == rows and sorted(part.arrays) == sorted(FIELDS)
        for name, array in part.arrays.items():
            assert (array == whole.arrays[name][rows:]).all(), name
        offers.withdraw(ref)
        with pytest.raises(OutOfStep, match="not on offer"):
            list(link.fetch(ref))


def test_a_leader_that_ends_is_heard_by_its_hosts() -> None:
    with leader(Security()) as (group, _, address):
        link = FollowerLink(address, Security())
        link.join(HELLO, 10.0)
        group.await_joined()
        heard: list[str] = []

        def listen() -> None:
            try:
                for _ in link.commands():
                    pass
            except HostLost as error:
                heard.append(str(error))

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
    thread.join(timeout=5.0)
    assert heard and "leader ended" in heard[0], heard
