"""Agents in a process of their own, to be killed as agents are; what they hold is dealt out by the corpus.

SIGUSR1: begin new lives, as the calendar would.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from tests.directory_servers.agents import PASSING_AT_ONCE, Agent
from tests.directory_servers.corpus import Corpus

END_TIMEOUT_S = 10.0


@dataclass
class AgentProcess:
    """The agents `numbers` of the corpus. Use as `with`; killed at the end."""

    url: str
    corpus: Corpus
    numbers: Sequence[int]
    churned: int = PASSING_AT_ONCE
    """How many keys of each agent come or go at once, five times a second."""
    process: "subprocess.Popen[bytes] | None" = None

    def __enter__(self) -> "AgentProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        words = [sys.executable, "-m", "tests.directory_servers.agent_process", self.url]
        words += [str(self.corpus), str(self.churned), *map(str, self.numbers)]
        self.process = subprocess.Popen(words)

    def kill(self) -> None:
        """As `kill -9`."""
        assert self.process is not None
        assert self.process.poll() is None, "the agents' process ended by itself"
        self.process.kill()
        self.process.wait(END_TIMEOUT_S)

    def walk(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGUSR1)


async def serve(url: str, corpus: Corpus, churned: int, numbers: Sequence[int]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        agents = [await stack.enter_async_context(Agent(url, str(number))) for number in numbers]
        for number, agent in zip(numbers, agents, strict=True):
            agent.hold(corpus.held_by(number))
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: [agent.walk() for agent in agents])
        async with asyncio.TaskGroup() as group:
            for number, agent in zip(numbers, agents, strict=True):
                group.create_task(agent.churn(number, churned))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("corpus", type=Corpus.read)
    parser.add_argument("churned", type=int)
    parser.add_argument("numbers", nargs="+", type=int)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.url, options.corpus, options.churned, options.numbers))


if __name__ == "__main__":
    main()
