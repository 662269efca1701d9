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
from directory.members import ROLES, Member, draw_incarnation, role_of
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
    refused: tuple[tuple[str, str], ...] = ()
    """Commands that it refused, each with its reason."""
    are_keys_known: bool = True

    def about(self, count: int) -> int:
        """A count among the keys seen, as one among all keys of the server."""
        if self.is_whole or not self.keys_seen:
            return count
        return round(count * max(self.report.keys or 0, self.keys_seen) / self.keys_seen)


@dataclass(frozen=True, slots=True)
class RecordStatistics:
    """Records, counted or (`is_exact` false) estimated; shares are of the holders in the records sampled.

    `None` is unknown: no server let its keys be seen, none of its records could be read, or the table couldn't. Where
    only some of the servers told, the figures are of these.
    """

    about_records: int | None
    about_records_by_partition: tuple[int, ...] | None
    is_exact: bool
    sampled: int
    holders_mean: float | None
    holders_p99: int | None
    holders_max: int | None
    bytes_mean: float | None
    holder_share_by_state: Mapping[str, float] | None
    holder_share_by_tier: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class DirectoryStatistics:
    """Everything `warmroute directory stats` says; `None` is unknown, and `refused` or a server's `error` says why."""

    servers: tuple[ServerReport, ...]
    records: RecordStatistics
    lives: Mapping[str, Mapping[str, int]] | None
    schema_versions: Mapping[str, int]
    """About how many keys there are of each; 0 for one that registered somebody and left nothing else."""
    lookup_keys: int
    lookup_median_s: float | None
    lookup_max_s: float | None
    refused: tuple[str, ...]

    @property
    def has_trouble(self) -> bool:
        """Whether a server didn't answer."""
        return any(server.error for server in self.servers)


async def gather(directory: SampledDirectory, clock: Callable[[], float] = time.perf_counter) -> DirectoryStatistics:
    """Sample every server and time a few lookups. Raises `DirectoryError` where none of the servers answers."""
    try:
        samples = [await _sample(node, directory.keys) for node in await directory.nodes()]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise DirectoryError(f"the server answered with something unexpected: {error}") from error
    if all(sample.report.error for sample in samples):
        raise DirectoryUnavailable("; ".join(f"{each.report.name}: {each.report.error}" for each in samples))
    refused = []
    members: tuple[Member, ...] | None = None
    try:
        members = await directory.members()
    except DirectoryError as error:
        refused.append(f"the fleet's table: {error}")
    keys = [key for sample in samples for key in sample.records][:LOOKUP_KEYS]
    while len(keys) < LOOKUP_KEYS:  # a key that nobody holds costs a lookup as much
        keys.append(draw_incarnation() * (DIRECTORY_KEY_BYTES // 8))
    spans: list[float] = []
    try:
        for _ in range(LOOKUPS):
            began_at = clock()
            await directory.lookup(keys, LOOKUP_DEADLINE_S)
            spans.append(clock() - began_at)
    except DirectoryError as error:
        refused.append(f"lookups: {error}")
    return summarise(samples, members, sorted(spans), refused)


def summarise(
    samples: Sequence[NodeSample],
    members: Sequence[Member] | None,
    sorted_spans_s: Sequence[float],
    refused: Sequence[str] = (),
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
        lives=None if members is None else _lives(members),
        schema_versions=versions,
        lookup_keys=LOOKUP_KEYS,
        lookup_median_s=sorted_spans_s[len(sorted_spans_s) // 2] if sorted_spans_s else None,
        lookup_max_s=sorted_spans_s[-1] if sorted_spans_s else None,
        refused=(*_refusals(samples), *refused),
    )


def _refusals(samples: Sequence[NodeSample]) -> list[str]:
    """What was refused: the commands of one reason together, with the servers where that isn't all of them."""
    servers_by_command: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for sample in samples:
        for command, reason in sample.refused:
            servers_by_command.setdefault(command, []).append(sample.report.name)
            reasons.setdefault(command, reason)
    commands_by_servers: dict[tuple[str, ...], list[str]] = {}
    for command, servers in servers_by_command.items():
        commands_by_servers.setdefault(tuple(servers), []).append(command)
    return [
        f"{', '.join(commands)}{'' if len(servers) == len(samples) else ' on ' + ', '.join(servers)}: "
        f"{reasons[commands[0]]}"
        for servers, commands in commands_by_servers.items()
    ]


def _record_statistics(all_samples: Sequence[NodeSample], members: Sequence[Member] | None) -> RecordStatistics:
    samples = [sample for sample in all_samples if sample.are_keys_known]
    by_partition = [0] * PARTITIONS
    for sample in samples:
        for kind, count in sample.kinds.items():
            if kind.what == "record" and kind.partition is not None:
                by_partition[kind.partition] += sample.about(count)
    states = {member.incarnation: state_of(member) for member in members or ()}
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
        about_records=sum(by_partition) if samples else None,
        about_records_by_partition=tuple(by_partition) if samples else None,
        is_exact=all(sample.is_whole for sample in all_samples),
        sampled=len(lengths),
        holders_mean=total / len(lengths) if lengths else None,
        holders_p99=lengths[(len(lengths) * 99) // 100] if lengths else None,
        holders_max=lengths[-1] if lengths else None,
        bytes_mean=sum(sizes) / len(sizes) if sizes else None,
        holder_share_by_state=_shares(by_state, total) if members is not None else None,
        holder_share_by_tier=_shares(by_tier, total),
    )


def _shares(counts: Mapping[str, int], total: int) -> dict[str, float] | None:
    return {name: count / total for name, count in counts.items()} if total else None


def state_of(member: Member) -> str:
    """`live`, `lapsed` or `retired`."""
    return "retired" if member.retired else "live" if member.is_live else "lapsed"


def _lives(members: Sequence[Member]) -> dict[str, dict[str, int]]:
    lives = {f"{role}s": {"live": 0, "lapsed": 0, "retired": 0} for role in ROLES}
    for member in members:
        lives[f"{role_of(member.registration)}s"][state_of(member)] += 1
    return lives


async def _sample(node: ServerNode, names: schema.Keyspace) -> NodeSample:
    """What the server holds; of one that doesn't answer its name and the error."""
    try:
        return await _sample_answering(node, names)
    except DirectoryUnavailable as error:
        return NodeSample(ServerReport(node.name, error=str(error)), are_keys_known=False)


async def _sample_answering(node: ServerNode, names: schema.Keyspace) -> NodeSample:
    refused: dict[str, str] = {}

    async def ask(*command: Any) -> Any:
        """The answer, or `None` where the server refuses the question."""
        try:
            return await node.execute(*command)
        except DirectoryUnavailable:
            raise
        except DirectoryError as error:
            refused.setdefault(str(command[0]), str(error))
            return None

    report = read_report(
        node.name,
        await ask("INFO"),
        await ask("DBSIZE"),
        await ask("FUNCTION LIST", "LIBRARYNAME", schema.LIBRARY, "WITHCODE"),
    )
    seen, is_whole = await _some_keys(ask)
    are_keys_known = bool(seen) or is_whole
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
        refused=tuple(refused.items()),
        are_keys_known=are_keys_known,
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
