"""`warmroute gateway`'s options, as workers are given them again."""

import argparse
import socket

import pytest

from gateway.config import ListenConfig
from gateway.servers import PortTaken, listen_for
from tests.free_port import free_port
from warmroute import gateway_command
from warmroute.gateway_command import _as_arguments

TYPED = (
    [],
    ["--config", "a file.yaml", "--redis", "redis://h:1", "--key-prefix", "x", "--port", "1", "--admin-port", "2"],
    ["--bind", "::1", "--engine", "http://a:1", "--engine", "http://b:1", "--workers", "3", "--log-level", "debug"],
)


@pytest.mark.parametrize("typed", TYPED, ids=len)
def test_what_was_typed_can_be_typed_again(typed: list[str]) -> None:
    parser = argparse.ArgumentParser()
    gateway_command.add_arguments(parser)
    options = parser.parse_args(typed)
    assert _as_arguments(options) == typed
    assert parser.parse_args(_as_arguments(options)) == options


def test_where_the_second_port_is_taken_the_first_is_free_again() -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        with pytest.raises(PortTaken):
            listen_for(ListenConfig(port=port))
    listeners = listen_for(ListenConfig(port=port))
    for each in (listeners.data, listeners.admin):
        each.close()
