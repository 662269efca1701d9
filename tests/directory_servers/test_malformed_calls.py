"""Malformed calls of the directory's functions, on Redis and on Valkey."""

from tests.directory.malformed_calls import check_malformed_calls_change_nothing, check_well_formed_calls_are_taken
from tests.directory.servers import ServerProcess


def test_malformed_calls_say_what_is_wrong_and_change_nothing(server: ServerProcess) -> None:
    check_malformed_calls_change_nothing(server.client())


def test_the_well_formed_ones_are_taken(server: ServerProcess) -> None:
    check_well_formed_calls_are_taken(server.client())
