"""What the NVMe tier knows of its files: by storage key and by directory key, how old, and how many bytes.

All of it runs on the event loop and never waits. After a start, files are first *listed* (a name and a size, counted
and evictable, but not found by anybody) and then *restored* from their headers, newest first. A restored chunk is the
oldest of all until `put_in_order` has seen every one: a file's time says when it was used, but a parent was often
written before its children, and must not be evicted before them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from directory.tiers import Tier
from nodeagent.labels import ChunkLabel
from nodeagent.tiers.chunk_file import FileHeader, file_bytes, name_of
from nodeagent.tiers.eviction import EvictionPolicy
from nodeagent.tiers.file_store import FoundFile

REORDER_STEP_KEYS = 4_096


@dataclass(eq=False, slots=True)
class NvmeEntry:
    """One chunk on disk. `identity` is the digest in its header; `length` and `checksum` are the payload's."""

    label: ChunkLabel
    identity: bytes
    length: int
    checksum: bytes

    @property
    def name(self) -> bytes:
        """Its file's name."""
        return name_of(self.label.storage_key)

    @property
    def size_bytes(self) -> int:
        """What its file takes."""
        return file_bytes(self.length)


@dataclass(frozen=True, slots=True)
class Aged:
    """A chunk in the account of use: when its file was last used, `math.inf` where it was used since the start."""

    key: bytes
    parent: bytes | None
    position: int
    used_at_s: float


class NvmeIndex:
    """Entries in the order in which they should go, and the bytes of all files, until they are gone from disk.

    `on_change(directory key, tier mask)` hears every newest state, as in `Hierarchy`.
    """

    def __init__(self, policy: EvictionPolicy, on_change: Callable[[bytes, int], None]) -> None:
        self.used_bytes = 0
        self._policy = policy
        self._on_change = on_change
        self._entries: dict[bytes, NvmeEntry] = {}
        self._by_directory_key: dict[bytes, list[bytes]] = {}
        self._listed: dict[bytes, int] = {}
        self._restored: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, storage_key: bytes) -> bool:
        return storage_key in self._entries

    @property
    def listed_files(self) -> int:
        """Files whose headers haven't been read yet."""
        return len(self._listed)

    def get(self, storage_key: bytes) -> NvmeEntry | None:
        """The chunk under this key, if a file is known to hold it."""
        return self._entries.get(storage_key)

    def label(self, storage_key: bytes) -> ChunkLabel:
        """The label of a chunk that is there."""
        return self._entries[storage_key].label

    def storage_keys(self, directory_key: bytes) -> Sequence[bytes]:
        """The storage keys of the chunks with this label."""
        return self._by_directory_key.get(directory_key, ())

    def directory_keys(self) -> list[bytes]:
        """All labels that are known."""
        return list(self._by_directory_key)

    def list_files(self, files: Iterable[FoundFile]) -> None:
        """Count files that were found, newest first. Nothing has been added before."""
        self._listed = {found.name: found.size_bytes for found in files}
        self.used_bytes = sum(self._listed.values())

    def is_listed(self, name: bytes) -> bool:
        """Whether the file of this name is counted, but not read yet."""
        return name in self._listed

    def take_oldest_listed(self) -> tuple[bytes, int] | None:
        """The name and size of the oldest listed file, which is to be removed; its bytes are still counted."""
        return self._listed.popitem() if self._listed else None

    def unlist(self, name: bytes) -> int:
        """A listed file is of no use: its size, still counted; 0 where it isn't listed."""
        return self._listed.pop(name, 0)

    def restore(self, header: FileHeader, used_at_s: float) -> None:
        """A listed file's header was read: index its chunk as the oldest, and announce it."""
        entry = NvmeEntry(header.label, header.identity, header.length, header.checksum)
        key = header.label.storage_key
        self.used_bytes += entry.size_bytes - self.unlist(entry.name)
        self._insert(entry)
        self._restored[key] = used_at_s
        self._policy.add_oldest(key, header.label.parent, header.label.position)

    def add(self, entry: NvmeEntry) -> None:
        """A chunk was written, over whatever file had its name: index and announce it."""
        key = entry.label.storage_key
        known = self._entries.get(key)
        if known is not None:
            self._delete(known)
            self.used_bytes -= known.size_bytes
        self.used_bytes += entry.size_bytes - self.unlist(entry.name)
        self._insert(entry)
        self._note_use(entry)
        self._policy.add(key, entry.label.parent, entry.label.position)

    def touch(self, storage_key: bytes) -> None:
        """A chunk was used, and with it its ancestors."""
        entry = self._entries.get(storage_key)
        if entry is not None:
            self._note_use(entry)
            self._policy.touch(storage_key)
            self._report(entry.label.directory_key)

    def set_label(self, entry: NvmeEntry, label: ChunkLabel) -> None:
        """A chunk's label has become known: announce it."""
        self._policy.remove(label.storage_key)
        self._forget_directory_key(entry)
        entry.label = label
        self._note_directory_key(entry)
        self._note_use(entry)
        self._policy.add(label.storage_key, label.parent, label.position)

    def drop(self, entry: NvmeEntry) -> bool:
        """Nobody finds a chunk any more; its file's bytes stay counted. Returns whether it was there."""
        if self._entries.get(entry.label.storage_key) is not entry:
            return False
        self._policy.remove(entry.label.storage_key)
        self._delete(entry)
        return True

    def take_victims(self, size_bytes: int, count_max: int) -> list[NvmeEntry]:
        """Un-index the oldest chunks until their files hold `size_bytes`; report them gone. They stay counted."""
        victims: list[NvmeEntry] = []
        while size_bytes > 0 and len(victims) < count_max:
            keys = self._policy.take_victims(1, lambda _: False)
            if not keys:
                break
            victims.append(self._entries[keys[0]])
            size_bytes -= victims[-1].size_bytes
            self._delete(victims[-1])
        return victims

    def account_of_use(self) -> tuple[list[NvmeEntry], Mapping[bytes, float]]:
        """A copy of what `order_of_use` needs, to be worked through elsewhere."""
        return list(self._entries.values()), dict(self._restored)

    def put_in_order(self, ordered: Sequence[Aged]) -> None:
        """Put restored chunks in their places. `ordered` is a stretch of `order_of_use`, from its end backwards."""
        for aged in ordered:
            if aged.key not in self._restored:
                continue
            if aged.used_at_s == math.inf:
                self._policy.touch(aged.key)
            else:
                self._policy.add_oldest(aged.key, aged.parent, aged.position)

    def end_restoring(self) -> None:
        """All files are read and in order."""
        self._restored.clear()

    def _note_use(self, entry: NvmeEntry | None) -> None:
        """While chunks are restored: this one and its ancestors are in their places already."""
        while entry is not None and self._restored:
            label = entry.label
            self._restored.pop(label.storage_key, None)
            entry = self._entries.get(label.parent) if label.parent is not None else None
            if entry is not None and entry.label.position != label.position - 1:
                return

    def _insert(self, entry: NvmeEntry) -> None:
        self._entries[entry.label.storage_key] = entry
        self._note_directory_key(entry)

    def _delete(self, entry: NvmeEntry) -> None:
        del self._entries[entry.label.storage_key]
        self._restored.pop(entry.label.storage_key, None)
        self._forget_directory_key(entry)

    def _note_directory_key(self, entry: NvmeEntry) -> None:
        key = entry.label.directory_key
        if key is not None:
            self._by_directory_key.setdefault(key, []).append(entry.label.storage_key)
            self._report(key)

    def _forget_directory_key(self, entry: NvmeEntry) -> None:
        key = entry.label.directory_key
        if key is None:
            return
        holders = self._by_directory_key[key]
        holders.remove(entry.label.storage_key)
        if not holders:
            del self._by_directory_key[key]
        self._report(key)

    def _report(self, key: bytes | None) -> None:
        if key is not None:
            self._on_change(key, int(Tier.NVME) if key in self._by_directory_key else 0)


def order_of_use(entries: Iterable[NvmeEntry], restored: Mapping[bytes, float]) -> list[Aged]:
    """Newest first; no chunk older than a child of its. What isn't `restored` was used just now.

    Children come before their parents (the deepest first), and hand up when they were used. Among chunks that were
    used at the same time the ancestors are the newer ones.
    """
    deepest_first = sorted(entries, key=lambda entry: entry.label.position, reverse=True)
    used = {entry.label.storage_key: restored.get(entry.label.storage_key, math.inf) for entry in deepest_first}
    positions = {entry.label.storage_key: entry.label.position for entry in deepest_first}
    for entry in deepest_first:
        label = entry.label
        if label.parent is not None and positions.get(label.parent) == label.position - 1:
            used[label.parent] = max(used[label.parent], used[label.storage_key])
    aged = [
        Aged(entry.label.storage_key, entry.label.parent, entry.label.position, used[entry.label.storage_key])
        for entry in deepest_first
    ]
    aged.sort(key=lambda each: (-each.used_at_s, each.position))
    return aged
