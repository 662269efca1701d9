"""An engine of one's own that isn't there: `warmroute up` waits for it a while, says so, and serves."""

import signal
from pathlib import Path

from tests.free_port import free_port
from tests.warmroute.fleets import up


def test_an_engine_that_is_not_there_is_said_and_does_not_stop_the_others(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    process = up(tmp_path, "--engine", url)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert f"{url}: unreachable: ConnectError (no model yet)" in errors
