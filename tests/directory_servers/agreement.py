"""Whether the directory says of the living what they hold, and nothing else."""

import asyncio
import time
from collections.abc import Iterable, Sequence

from directory.errors import DirectoryUnavailable
from directory.placements import unpack_holders
from directory.redis_directory import RedisDirectory
from tests.directory_servers.agents import Agent

LOOKUP_KEYS = 256
LOOKUP_S = 1.0


async def records_of(directory: RedisDirectory, keys: Sequence[bytes]) -> dict[bytes, bytes | None]:
    """The record of each key."""
    found: dict[bytes, bytes | None] = {}
    for start in range(0, len(keys), LOOKUP_KEYS):
        asked = keys[start : start + LOOKUP_KEYS]
        answer = await directory.lookup(asked, LOOKUP_S)
        found |= zip(asked, answer.records, strict=True)
    return found


async def differences(directory: RedisDirectory, agents: Iterable[Agent], extra: Iterable[bytes] = ()) -> list[str]:
    """Where records differ from the inventories of agents, as far as the living go; empty for equality.

    `extra`: keys to look at that nobody needs to hold.
    """
    held: dict[bytes, dict[bytes, int]] = {}
    for agent in agents:
        if not agent.is_settled:
            return [f"agent {agent.name} isn't settled"]
        held |= agent.masks()
    living = {member.incarnation for member in await directory.members() if member.is_live}
    found = [f"life {life.hex()} isn't registered" for life in held.keys() - living]
    keys = list({key for masks in held.values() for key in masks} | set(extra))
    for key, record in (await records_of(directory, keys)).items():
        expected = {life: masks[key] for life, masks in held.items() if key in masks}
        said = None if record is None else {life: mask for life, mask in unpack_holders(record) if life in living}
        if said != expected:
            found.append(f"key {key.hex()}: {said} is said, {expected} is so")
    return found


async def until_equal(
    directory: RedisDirectory, agents: Sequence[Agent], extra: Sequence[bytes], bound_s: float
) -> None:
    """Wait until there are no `differences`, at most `bound_s`, answered or not. Agents must be at rest."""
    ends_at = time.monotonic() + bound_s
    while True:
        try:
            found = await differences(directory, agents, extra)
        except DirectoryUnavailable as error:
            found = [str(error)]
        if not found:
            return
        assert time.monotonic() < ends_at, found[:5]
        await asyncio.sleep(0.1)


async def incarnations(directory: RedisDirectory) -> dict[bytes, str]:
    """Whose each incarnation in the table is."""
    return {member.incarnation: str(member.registration) for member in await directory.members()}
