"""What a directory's servers hold, for an operator: sampled with bounded effort, never a scan of everything.

`gather` asks each server a few dozen bounded questions; `summarise` is arithmetic over what they said. A question that
a server refuses (an ACL that doesn't grant it) leaves its figures out and is named in `refused`.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from directory import redis_schema as schema
from directory.chunks import DIRECTORY_KEY_BYTES
from directory.errors import DirectoryError, DirectoryUnavailable
from directory.interface import Lookup
from directory.members import HostRegistration, Member, draw_incarnation
from directory.placements import PARTITIONS, unpack_holders
from directory.server_report import ServerReport, read_report
from directory.tiers import TIERS

SCANS_MAX = 40
SCAN_KEYS = 250
"""A sample looks at about `SCANS_MAX * SCAN_KEYS` keys of each server, and at `RECORDS_MAX` records among them."""
RECORDS_MAX = 1000
SIZES_MAX = 64
"""Records of each server whose memory is asked for."""
LOOKUPS = 20
LOOKUP_KEYS = 128
LOOKUP_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class ServerNode:
    """One server that holds a part of the records (a master of a cluster, or the only one).

    `execute` sends it one command and raises `DirectoryError`.
    """

    name: str
    execute: Callable[..., Awaitable[Any]]


class SampledDirectory(Protocol):
    """What statistics need of a directory on servers."""

    @property
    def keys(self) -> schema.Keyspace:
        """How the fleet's keys are named."""
        ...

    async def nodes(self) -> Sequence[ServerNode]:
        """Every server that holds records."""
        ...

    async def members(self) -> tuple[Member, ...]:
        """As `DirectoryReader.members`."""
        ...

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> Lookup:
        """As `DirectoryReader.lookup`."""
        ...


@dataclass(frozen=True, slots=True)
class NodeSample:
    """What was seen of one server: keys by kind, and records as they are."""

    report: ServerReport
    keys_seen: int = 0
    is_whole: bool = False
    kinds: Mapping[schema.KeyKind, int] = field(default_factory=dict)
    records: Mapping[bytes, bytes] = field(default_factory=dict)
    record_bytes: tuple[int, ...] = ()
    registered_versions: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def about(self, count: int) -> int:
        """A count among the keys seen, as one among all keys of the server."""
        if self.is_whole or not self.keys_seen:
            return count
        return round(count * max(self.report.keys or 0, self.keys_seen) / self.keys_seen)


@dataclass(frozen=True, slots=True)
class RecordStatistics:
    """Records, counted or (`is_exact` false) estimated; shares are of the holders in the records sampled."""

    about_records: int
    about_records_by_partition: tuple[int, ...]
    is_exact: bool
    sampled: int
    holders_mean: float
    holders_p99: int
    holders_max: int
    bytes_mean: float | None
    holder_share_by_state: Mapping[str, float]
    holder_share_by_tier: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DirectoryStatistics:
    """Everything `warmroute directory stats` says."""

    servers: tuple[ServerReport, ...]
    records: RecordStatistics
    lives: Mapping[str, Mapping[str, int]]
    schema_versions: Mapping[str, int]
    """About how many keys there are of each; 0 for one that registered somebody and left nothing else."""
    lookup_keys: int
    lookup_median_s: float
    lookup_max_s: float
    refused: tuple[str, ...]


async def gather(directory: SampledDirectory, clock: Callable[[], float] = time.perf_counter) -> DirectoryStatistics:
    """Sample every server and time a few lookups. Raises `DirectoryError`."""
    try:
        samples = [await _sample(node, directory.keys) for node in await directory.nodes()]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise DirectoryError(f"the server answered with something unexpected: {error}") from error
    members = await directory.members()
    keys = [key for sample in samples for key in sample.records][:LOOKUP_KEYS]
    while len(keys) < LOOKUP_KEYS:  # a key that nobody holds costs a lookup as much
        keys.append(draw_incarnation() * (DIRECTORY_KEY_BYTES // 8))
    spans = []
    for _ in range(LOOKUPS):
        began_at = clock()
        await directory.lookup(keys, LOOKUP_DEADLINE_S)
        spans.append(clock() - began_at)
    return summarise(samples, members, sorted(spans))


def summarise(
    samples: Sequence[NodeSample], members: Sequence[Member], sorted_spans_s: Sequence[float]
) -> DirectoryStatistics:
    """The arithmetic: no I/O."""
    versions = dict.fromkeys((version for sample in samples for version in sample.registered_versions), 0)
    for sample in samples:
        for kind, count in sample.kinds.items():
            if kind.what != "versions":
                versions[kind.version] = versions.get(kind.version, 0) + sample.about(count)
    return DirectoryStatistics(
        servers=tuple(sample.report for sample in samples),
        records=_record_statistics(samples, members),
        lives=_lives(members),
        schema_versions=versions,
        lookup_keys=LOOKUP_KEYS,
        lookup_median_s=sorted_spans_s[len(sorted_spans_s) // 2],
        lookup_max_s=sorted_spans_s[-1],
        refused=tuple(text for sample in samples for text in sample.refused),
    )


def _record_statistics(samples: Sequence[NodeSample], members: Sequence[Member]) -> RecordStatistics:
    by_partition = [0] * PARTITIONS
    for sample in samples:
        for kind, count in sample.kinds.items():
            if kind.what == "record" and kind.partition is not None:
                by_partition[kind.partition] += sample.about(count)
    states = {member.incarnation: state_of(member) for member in members}
    by_state = Counter({"live": 0, "lapsed": 0, "retired": 0, "unknown": 0})
    by_tier = Counter({tier.label: 0 for tier in TIERS})
    lengths = []
    for record in (record for sample in samples for record in sample.records.values()):
        holders = unpack_holders(record)
        lengths.append(len(holders))
        for incarnation, mask in holders:
            by_state[states.get(incarnation, "unknown")] += 1
            by_tier.update(tier.label for tier in TIERS if tier & mask)
    lengths.sort()
    sizes = [size for sample in samples for size in sample.record_bytes]
    total = sum(lengths)
    return RecordStatistics(
        about_records=sum(by_partition),
        about_records_by_partition=tuple(by_partition),
        is_exact=all(sample.is_whole for sample in samples),
        sampled=len(lengths),
        holders_mean=total / len(lengths) if lengths else 0.0,
        holders_p99=lengths[(len(lengths) * 99) // 100] if lengths else 0,
        holders_max=lengths[-1] if lengths else 0,
        bytes_mean=sum(sizes) / len(sizes) if sizes else None,
        holder_share_by_state={state: count / total if total else 0.0 for state, count in by_state.items()},
        holder_share_by_tier={tier: count / total if total else 0.0 for tier, count in by_tier.items()},
    )


def state_of(member: Member) -> str:
    """`live`, `lapsed` or `retired`."""
    return "retired" if member.retired else "live" if member.is_live else "lapsed"


def _lives(members: Sequence[Member]) -> dict[str, dict[str, int]]:
    lives = {role: {"live": 0, "lapsed": 0, "retired": 0} for role in ("hosts", "engines")}
    for member in members:
        role = "hosts" if isinstance(member.registration, HostRegistration) else "engines"
        lives[role][state_of(member)] += 1
    return lives


async def _sample(node: ServerNode, names: schema.Keyspace) -> NodeSample:
    refused: list[str] = []

    async def ask(*command: Any) -> Any:
        """The answer, or `None` where the server refuses the question."""
        try:
            return await node.execute(*command)
        except DirectoryUnavailable:
            raise
        except DirectoryError as error:
            refused.append(f"{node.name} {command[0]}: {error}")
            return None

    report = read_report(
        node.name,
        await ask("INFO"),
        await ask("DBSIZE"),
        await ask("FUNCTION LIST", "LIBRARYNAME", schema.LIBRARY, "WITHCODE"),
    )
    seen, is_whole = await _some_keys(ask)
    kinds = {key: kind for key in seen if (kind := names.kind_of(key)) is not None}
    by_partition: dict[int, list[bytes]] = {}
    record_keys = [key for key, kind in kinds.items() if kind.what == "record" and kind.version == schema.VERSION]
    for key in record_keys[:RECORDS_MAX]:
        by_partition.setdefault(kinds[key].partition or 0, []).append(key)
    records: dict[bytes, bytes] = {}
    for keys in by_partition.values():  # in a cluster one call may name keys of one slot only
        values = await ask("MGET", *keys) or []
        records |= {key[-DIRECTORY_KEY_BYTES:]: value for key, value in zip(keys, values, strict=False) if value}
    sizes = [await ask("MEMORY USAGE", key) for key in record_keys[:SIZES_MAX]]
    return NodeSample(
        report,
        len(seen),
        is_whole,
        Counter(kinds.values()),
        records,
        tuple(size for size in sizes if isinstance(size, int)),
        await _registered_versions(node, names),
        refused=tuple(dict.fromkeys(refused)),
    )


async def _registered_versions(node: ServerNode, names: schema.Keyspace) -> tuple[str, ...]:
    """The schemas that registered somebody; of a cluster's nodes two know them, the others refuse to say."""
    found: set[str] = set()
    for home in schema.TABLE_HOMES_IN_A_CLUSTER:
        try:
            versions = await node.execute("HKEYS", names.versions(home))
        except DirectoryUnavailable:
            raise
        except DirectoryError:
            continue
        found.update(version.decode(errors="replace") for version in versions)
    return tuple(sorted(found))


async def _some_keys(ask: Callable[..., Awaitable[Any]]) -> tuple[set[bytes], bool]:
    """Keys in the order of the server's hash table, which is as good as chance; and whether they are all."""
    seen: set[bytes] = set()
    cursor = 0
    for _ in range(SCANS_MAX):
        answer = await ask("SCAN", cursor, "COUNT", SCAN_KEYS)
        if answer is None:
            return seen, False
        cursor, keys = int(answer[0]), answer[1]
        seen.update(keys)
        if cursor == 0:
            return seen, True
    return seen, False
