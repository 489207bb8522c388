"""A slot's life reaches as far as the device arrays that alias it."""

from __future__ import annotations

import gc
import mmap
import weakref

import numpy as np
import pytest

from prestage.wire.arena import Lease, address_of

jax = pytest.importorskip("jax")


def test_a_device_array_on_a_slot_keeps_it_leased() -> None:
    """On CPU, jax aliases aligned host memory instead of copying it."""
    memory = mmap.mmap(-1, 1 << 16)
    ended: list[bool] = []
    lease = Lease(address_of(memory), 1 << 16, readonly=True)
    weakref.finalize(lease, ended.append, True)
    view = lease.buffer().view(np.int32)
    on_device = jax.device_put(view, jax.devices("cpu")[0]).block_until_ready()
    aliases = on_device.unsafe_buffer_pointer() == view.__array_interface__["data"][0]
    del lease, view
    gc.collect()
    if aliases:
        memory[0:4] = (9).to_bytes(4, "little")
        assert int(on_device[0]) == 9
        assert not ended, "the slot would be written while the device reads it"
    del on_device
    gc.collect()
    assert ended
