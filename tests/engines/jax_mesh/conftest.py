"""These tests run on 8 virtual CPU devices."""

from pathlib import Path

from tests.support.eight_devices import EightDevices

_devices = EightDevices(Path(__file__).parent)
pytest_collection_modifyitems = _devices.pytest_collection_modifyitems
pytest_runtest_protocol = _devices.pytest_runtest_protocol
pytest_runtest_makereport = _devices.pytest_runtest_makereport
