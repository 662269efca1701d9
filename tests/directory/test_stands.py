"""The contract in memory and on one server; `tests/directory_servers` holds it on groups of servers."""

from tests.directory.contract import TestLookups, TestPlacements, TestRegistrations

__all__ = ["TestLookups", "TestPlacements", "TestRegistrations"]
