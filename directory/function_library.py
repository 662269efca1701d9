"""Loading the directory's functions on every master, for an operator whose agents may not: once, before the fleet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from directory import redis_schema as schema
from directory.errors import DirectoryError
from directory.server_report import functions_state
from directory.statistics import ServerNode


@dataclass(frozen=True, slots=True)
class ServerLoaded:
    """What became of one server: `kept` is another release's library that wasn't to be replaced."""

    server: str
    became: Literal["loaded", "current", "replaced", "kept", "failed"]
    error: str = ""


async def load_functions(nodes: Sequence[ServerNode], is_forced: bool) -> tuple[ServerLoaded, ...]:
    """Load the functions where they are missing, and over another release's where `is_forced`; twice is harmless.

    A server that fails doesn't keep the others from being loaded: its error is in its row.
    """
    return tuple([await _load_on(node, is_forced) for node in nodes])


async def _load_on(node: ServerNode, is_forced: bool) -> ServerLoaded:
    try:
        found = functions_state(await node.execute("FUNCTION LIST", "LIBRARYNAME", schema.LIBRARY, "WITHCODE"))
        if found == "current":
            return ServerLoaded(node.name, "current")
        if found == "missing":
            await node.execute("FUNCTION LOAD", schema.functions_source())
            return ServerLoaded(node.name, "loaded")
        if not is_forced:
            return ServerLoaded(node.name, "kept")
        await node.execute("FUNCTION LOAD", "REPLACE", schema.functions_source())
        return ServerLoaded(node.name, "replaced")
    except DirectoryError as error:
        return ServerLoaded(node.name, "failed", str(error))
