"""One server alone, Debian's Redis or the bundled Valkey."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.directory.servers import ServerProcess, bundled_binary
from tests.directory_servers.installation import redis_server_binary

BINARIES: dict[str, Callable[[], Path]] = {"redis": redis_server_binary, "valkey": bundled_binary}


@contextmanager
def standalone(brand: str, **options: str) -> Iterator[ServerProcess]:
    """A server of that brand; `options` are lines of its configuration, with underscores for dashes."""
    lines = {name.replace("_", "-"): value for name, value in options.items()}
    with tempfile.TemporaryDirectory(prefix="wr-server-") as folder:
        server = ServerProcess(Path(folder) / "server", lines, binary=BINARIES[brand]())
        server.start()
        try:
            yield server
        finally:
            server.kill()


def url_of(server: ServerProcess) -> str:
    return f"redis://127.0.0.1:{server.port}"
