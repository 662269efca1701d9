"""Whether the directory says what the agents hold: all of it, and nothing else."""

import asyncio

import redis

from directory.members import EngineRegistration
from directory.placements import partition_of, unpack_holders
from directory.redis_directory import RedisDirectory
from directory.redis_schema import record_key
from tests.nodeagent.running import RunningAgent, eventually

KEY_BYTES = 16
KEYS_AT_ONCE = 256
"""A lookup of more keys stops at the first step with a key that nobody holds."""

Contents = dict[str, dict[bytes, int]]
"""Host or engine -> directory key -> tier mask."""


def inventories(*agents: RunningAgent) -> Contents:
    """What agents hold, by name of host or engine."""
    contents: Contents = {}
    for running in agents:

        def collect(running: RunningAgent = running) -> Contents:
            agent = running.agent
            publishers = {running.config.host: agent._host}
            publishers |= {engine.name: engine.publisher for engine in agent._roster.engines}
            return {
                name: {key: publisher.inventory.mask(key) for key in publisher.inventory}
                for name, publisher in publishers.items()
            }

        contents |= running.on_loop(collect)
    return contents


def directory_contents(url: str) -> Contents:
    """What a reader believes of every record on the server: live holders only; names without any are there, too."""
    with redis.Redis.from_url(url) as raw:
        records = [name[-KEY_BYTES:] for name in raw.scan_iter(b"wr:v1:*", count=1_000) if len(name) > KEY_BYTES]
        records = [key for key in records if raw.exists(record_key(key))]
    return asyncio.run(_read(url, records))


async def _read(url: str, keys: list[bytes]) -> Contents:
    directory = RedisDirectory.connect(url)
    try:
        members = [member for member in await directory.members() if member.is_live]
        names = {
            member.incarnation: member.registration.engine
            if isinstance(member.registration, EngineRegistration)
            else member.registration.host
            for member in members
        }
        contents: Contents = {name: {} for name in names.values()}
        for start in range(0, len(keys), KEYS_AT_ONCE):
            asked = keys[start : start + KEYS_AT_ONCE]
            found = await directory.lookup(asked, 5.0)
            for key, record in zip(asked, found.records, strict=True):
                for holder, mask in unpack_holders(record or b""):
                    if holder in names:
                        held = contents[names[holder]]
                        held[key] = held.get(key, 0) | mask
        return contents
    finally:
        await directory.aclose()


def differences(url: str, *agents: RunningAgent) -> list[str]:
    """In plain words, where the directory and the agents' inventories differ."""
    said, held = directory_contents(url), inventories(*agents)
    found = [f"{name} isn't registered" for name in held.keys() - said.keys()]
    found += [f"{name} is registered and not here" for name in said.keys() - held.keys()]
    for name in said.keys() & held.keys():
        for key in said[name].keys() | held[name].keys():
            one, other = said[name].get(key, 0), held[name].get(key, 0)
            if one != other:
                found.append(f"{name}, partition {partition_of(key)}: {key.hex()} is said in {one}, held in {other}")
    return found


def directory_comes_to_equal_inventories(url: str, *agents: RunningAgent, wait_s: float = 30.0) -> None:
    """Wait, with a bound, until the directory at `url` says exactly what `agents` hold; else say the differences."""
    last: list[str] = []

    def agrees() -> bool:
        last[:] = differences(url, *agents)
        return not last

    try:
        eventually(agrees, wait_s=wait_s)
    except AssertionError:
        raise AssertionError(f"{len(last)} differences: {last[:8]}") from None
