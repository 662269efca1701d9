"""Answers leave at once: on a connection that asyncio doesn't know for TCP, each small write waits 40 ms for an ACK."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from gateway.servers import listen as listen_gateway
from nodeagent.engines.reference.serve import _listen as listen_engine
from nodeagent.http_api import listen as listen_agent


@pytest.mark.parametrize("listen", [listen_gateway, listen_engine, listen_agent], ids=["gateway", "engine", "agent"])
async def test_a_connection_sends_small_pieces_without_delay(listen: Callable[[str, int], socket.socket]) -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with listen("127.0.0.1", 0) as listener:
        async with await asyncio.start_server(note, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await asyncio.wait_for(accepted, 20)
            await reader.read()
            writer.close()
            await writer.wait_closed()
