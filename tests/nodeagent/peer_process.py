"""An agent that other agents fetch from, in a process of its own, with the chunks of an engine in it.

`python -m tests.nodeagent.peer_process FOLDER CHUNK_BYTES NAME...` says its address, and then waits on its input.
"""

import sys
from pathlib import Path

from nodeagent.client import PutResult
from tests.nodeagent.peering import SERVING
from tests.nodeagent.running import WAIT_S, connected, label, make_hello, payload, running_agent

PEER_SLOTS = 5


def main(folder: str, chunk_bytes: int, names: list[str]) -> None:
    hello = make_hello("far-1", chunk_bytes=chunk_bytes)
    dram_bytes = 4_096 + PEER_SLOTS * chunk_bytes
    with running_agent(Path(folder), peers=SERVING, dram_bytes=dram_bytes) as agent:
        with connected(agent.config.door, hello) as engine:
            for name in names:
                assert engine.put(label(name), payload(name, chunk_bytes), WAIT_S) is PutResult.STORED
            print(agent.agent._peers.address, flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
