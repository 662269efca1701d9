"""What a server can answer, and what the directory makes of it."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from directory.errors import DirectoryError, DirectoryFull, DirectoryUnavailable, SchemaMismatch
from directory.redis_directory import RedisDirectory
from tests.directory.fleet_samples import batch, incarnation, key

READ_BYTES_MAX = 65536
DEADLINE_S = 5.0

Answering = Callable[[bytes], Awaitable[RedisDirectory]]


@pytest.fixture
async def answering() -> AsyncIterator[Answering]:
    """Directories on servers that give one answer to everything."""
    async with AsyncExitStack() as stack:

        async def start(answer: bytes) -> RedisDirectory:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while data := await reader.read(READ_BYTES_MAX):
                    writer.write(answer * data.count(b"*"))
                    if not answer:
                        break
                writer.close()

            server = await stack.enter_async_context(await asyncio.start_server(serve, "127.0.0.1", 0))
            directory = RedisDirectory.connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            stack.push_async_callback(directory.aclose)
            return directory

        yield start


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"-LOADING Valkey is loading the dataset in memory\r\n", DirectoryUnavailable),
        (b"-READONLY You can't write against a read only replica.\r\n", DirectoryUnavailable),
        (b"-MASTERDOWN Link with MASTER is down\r\n", DirectoryUnavailable),
        (b"-CLUSTERDOWN The cluster is down\r\n", DirectoryUnavailable),
        (b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n", DirectoryUnavailable),
        (b"-BUSY Valkey is busy running a script.\r\n", DirectoryUnavailable),
        (b"-NOREPLICAS Not enough good replicas to write.\r\n", DirectoryUnavailable),
        (b"-NOAUTH Authentication required.\r\n", DirectoryUnavailable),
        (b"", DirectoryUnavailable),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", DirectoryFull),
        (b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n", SchemaMismatch),
        (b"-NOPERM User agent has no permissions\r\n", DirectoryError),
        (b"-ERR something else\r\n", DirectoryError),
        (b"-ERR unknown command 'FCALL', with args beginning with: 'wr_v1_place'\r\n", DirectoryError),
    ],
    ids=lambda value: value.split()[0].decode() if isinstance(value, bytes) and value else None,
)
async def test_every_answer_has_its_error(answering: Answering, answer: bytes, kind: type[DirectoryError]) -> None:
    directory = await answering(answer)
    for call in (directory.lookup([key(1)], DEADLINE_S), directory.place(batch(incarnation(1), 0, {key(1): 1}))):
        with pytest.raises(DirectoryError) as caught:
            await call
        assert type(caught.value) is kind
        assert caught.value.__cause__ is not None


async def test_a_call_that_is_closed_before_it_began_is_not_reported_as_forgotten(answering: Answering) -> None:
    directory = await answering(b"*0\r\n")
    lookup = asyncio.create_task(directory.lookup([key(1)], DEADLINE_S))
    await asyncio.sleep(0)
    await directory.aclose()
    with pytest.raises(DirectoryUnavailable, match="closed"):
        await lookup
    gc.collect()


async def test_what_is_no_answer_at_all_is_an_error_of_the_directory(answering: Answering) -> None:
    directory = await answering(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(DirectoryError):
        await directory.lookup([key(1)], DEADLINE_S)


async def test_a_server_without_functions_is_told_what_it_must_be(answering: Answering) -> None:
    directory = await answering(b"-ERR unknown command `FCALL`, with args beginning with: `wr_v1_retire`, \r\n")
    with pytest.raises(DirectoryError, match="must be Redis 7"):
        await directory.retire(incarnation(1))
