"""An engine's process for tests: attaches, does what it is told, and then waits on its standard input.

`python -m tests.nodeagent.engine_process DOOR ENGINE open|reserve|drop|put NAME...`, or `... serve`, which does what
lines on its standard input say:

    open NAME...    prints `held` and how many are
    read            copies all that is held, and prints what each copy is: `good`, `miss`, or `WRONG`
    put NAME...     prints what became of each
    halt            from now on this process stops itself (SIGSTOP) in the midst of every copy
"""

import os
import signal
import sys

from nodeagent import arena_map
from nodeagent.messages import Reserve
from tests.nodeagent.clients import WAIT_S, connected, label, make_hello, payload, storage_key


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
        elif what == "serve":
            print("attached", flush=True)
            serve(client)
        sys.stdin.read()


def serve(client) -> None:
    held = {}
    for line in sys.stdin:
        what, *names = line.split()
        if what == "open":
            chunks = client.open([storage_key(name) for name in names], WAIT_S)
            held.update(zip(names, chunks, strict=False))
            print("held", len(chunks), *(chunk.tier for chunk in chunks), flush=True)
        elif what == "read":
            print(*(verdict(client, name, chunk) for name, chunk in held.items()), flush=True)
            client.close(list(held.values()))
            held.clear()
        elif what == "put":
            print(*(client.put(label(name), payload(name), WAIT_S).name for name in names), flush=True)
        elif what == "halt":
            arena_map._copy = halting_copy


def verdict(client, name: str, chunk) -> str:
    target = bytearray(chunk.length)
    if not client.read_into(chunk, memoryview(target)):
        return "miss"
    return "good" if target == payload(name) else "WRONG"


def halting_copy(target: memoryview, source: memoryview) -> None:
    half = source.nbytes // 2
    target[:half] = source[:half]
    os.kill(os.getpid(), signal.SIGSTOP)
    target[half:] = source[half:]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
