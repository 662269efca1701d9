"""An engine's process for tests: attaches, does what it is told, and then waits on its standard input.

`python -m tests.nodeagent.engine_process DOOR ENGINE open|reserve NAME...`
"""

import sys

from nodeagent.messages import Reserve
from tests.nodeagent.running import WAIT_S, connected, label, make_hello, payload, storage_key


def main(door: str, engine: str, what: str, names: list[str]) -> None:
    with connected(door, make_hello(engine)) as client:
        if what == "open":
            held = client.open([storage_key(name) for name in names], WAIT_S)
            print("held", len(held), flush=True)
        elif what == "reserve":
            link = client._attachment.link
            for name in names:
                chunk = label(name)
                link.request(
                    lambda number, chunk=chunk: Reserve(
                        number, chunk.storage_key, chunk.directory_key, None, 0, 100, b"c" * 16
                    ),
                    WAIT_S,
                )
            print("held", len(names), flush=True)
        elif what == "drop":
            held = client.open([storage_key(name) for name in names], WAIT_S)
            client._stopping.set()
            client._attachment.link.shut()
            client._thread.join(WAIT_S)
            print("held", len(held), flush=True)
        elif what == "put":
            for name in names:
                print(client.put(label(name), payload(name), WAIT_S).name, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
