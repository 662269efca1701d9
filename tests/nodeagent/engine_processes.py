"""Engines as processes of their own, told line by line what to do; see `engine_process.py`."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.nodeagent.running import WAIT_S, eventually


class EngineProcess:
    """An engine's process with the real client in it. Always used with a bound: the test's own timeout."""

    def __init__(self, door: str, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.nodeagent.engine_process", door, name, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, *words: str) -> None:
        """Have it do something, and don't wait."""
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> list[str]:
        """The words of its next line."""
        return self.process.stdout.readline().split()

    def ask(self, *words: str) -> list[str]:
        """Have it do something, and wait for what it says."""
        self.tell(*words)
        return self.answer()

    def wait_stopped(self) -> None:
        """Until it has stopped itself."""
        eventually(lambda: self._state() == "T", f"the stop of {self.name}")

    def go_on(self) -> None:
        """Let it run again."""
        self.process.send_signal(signal.SIGCONT)

    def _state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@contextmanager
def engines(door: str, *names: str) -> Iterator[list[EngineProcess]]:
    """Engines that are attached, started side by side, and killed in the end."""
    running = [EngineProcess(door, name) for name in names]
    try:
        assert [each.answer() for each in running] == [["attached"]] * len(names)
        yield running
    finally:
        for each in running:
            each.process.kill()
        for each in running:
            each.process.communicate(timeout=WAIT_S)


@contextmanager
def engine(door: str, name: str) -> Iterator[EngineProcess]:
    """One of them."""
    with engines(door, name) as running:
        yield running[0]
