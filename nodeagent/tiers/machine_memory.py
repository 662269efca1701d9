"""What memory this machine has for the agent: in all and now, within control groups' limits, in huge pages, on a node.

Everything is read anew from /proc and /sys at each call. The limit of a control group counts wherever it stands in the
tree above this process, in version 1 and in version 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
TRANSPARENT_SETTINGS = frozenset({"always", "within_size", "advise", "force"})
"""What the kernel's shmem_enabled must say for shared memory to get transparent huge pages."""
_POOL = "hugepages/hugepages-2048kB"


@dataclass(frozen=True, slots=True)
class HugePool:
    """The kernel's reserved pages of 2 MiB: all, and those that nobody has or was promised."""

    total_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """One control group's limit, and what is used of it that the kernel couldn't reclaim."""

    limit_bytes: int
    used_bytes: int


class MachineMemory:
    """This machine's memory, or that of another whose /proc and /sys lie below `root`."""

    def __init__(self, root: str = "/") -> None:
        self._root = Path(root)

    def total_bytes(self) -> int:
        """All there is for this process: the machine's memory, or the smallest limit of its control groups."""
        return min([self._meminfo("/proc/meminfo", "MemTotal"), *(each.limit_bytes for each in self._limits())])

    def available_bytes(self) -> int:
        """What can be had now without swapping, as the kernel estimates it, within every limit; it may be negative."""
        left = [each.limit_bytes - each.used_bytes for each in self._limits()]
        return min([self._meminfo("/proc/meminfo", "MemAvailable"), *left])

    def nodes(self) -> tuple[int, ...]:
        """The NUMA nodes that have memory; node 0 alone where the kernel doesn't know of any."""
        return _numbers(self._text("/sys/devices/system/node/has_memory")) or (0,)

    def available_on(self, node: int) -> int:
        """What can be had now on one node: free pages, and those of the page cache."""
        place = f"/sys/devices/system/node/node{node}/meminfo"
        names = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
        if self._text(place) is None:
            return self.available_bytes()
        return min(sum(self._meminfo(place, name) for name in names), self.available_bytes())

    def huge_pool(self, node: int | None = None) -> HugePool:
        """The pool of 2 MiB pages, or one node's part of it."""
        place = f"/sys/kernel/mm/{_POOL}" if node is None else f"/sys/devices/system/node/node{node}/{_POOL}"
        if node is not None and self._text(f"{place}/nr_hugepages") is None:
            return self.huge_pool()
        total, free = (self._number(f"{place}/{name}") or 0 for name in ("nr_hugepages", "free_hugepages"))
        # What is reserved is counted for the machine only: of a node, this may say too much, and allocating fails then.
        promised = self._number(f"/sys/kernel/mm/{_POOL}/resv_hugepages") or 0
        return HugePool(total * HUGE_PAGE_BYTES, max(0, free - promised) * HUGE_PAGE_BYTES)

    def transparent_setting(self) -> str:
        """The kernel's word on transparent huge pages for shared memory, such as `never` or `advise`."""
        text = self._text("/sys/kernel/mm/transparent_hugepage/shmem_enabled") or ""
        return text.partition("[")[2].partition("]")[0] or "never"

    def _limits(self) -> list[GroupLimit]:
        mounts = dict(self._mounts())
        limits = []
        for line in (self._text("/proc/self/cgroup") or "").splitlines():
            number, controllers, path = line.split(":", 2)
            version = 2 if number == "0" else 1 if "memory" in controllers.split(",") else 0
            if version not in mounts:
                continue
            base, place = mounts[version]
            # Where this process sees another root than its own group's path, its group is what is mounted.
            inner = path.removeprefix(base.rstrip("/")) if (path + "/").startswith(base.rstrip("/") + "/") else "/"
            steps = [step for step in inner.split("/") if step not in ("", "..")]
            for depth in range(len(steps), -1, -1):
                folder = "/".join([place, *steps[:depth]])
                limit = self._limit_v2(folder) if version == 2 else self._limit_v1(folder)
                limits += [] if limit is None else [limit]
        return limits

    def _mounts(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """Version, and (root, place), of the hierarchies that may limit memory."""
        for line in (self._text("/proc/self/mountinfo") or "").splitlines():
            left, _, right = line.partition(" - ")
            kind, *rest = right.split()
            fields = [field.replace("\\040", " ") for field in left.split()]
            if kind == "cgroup2":
                yield 2, (fields[3], fields[4])
            elif kind == "cgroup" and "memory" in rest[-1].split(","):
                yield 1, (fields[3], fields[4])

    def _limit_v2(self, folder: str) -> GroupLimit | None:
        limits = [each for name in ("max", "high") if (each := self._number(f"{folder}/memory.{name}")) is not None]
        if not limits:
            return None
        used = self._number(f"{folder}/memory.current") or 0
        cached = self._cached(folder, "inactive_file", "active_file")
        return GroupLimit(min(limits), max(0, used - cached))

    def _limit_v1(self, folder: str) -> GroupLimit | None:
        limit = self._number(f"{folder}/memory.limit_in_bytes")
        if limit is None:
            return None
        used = self._number(f"{folder}/memory.usage_in_bytes") or 0
        cached = self._cached(folder, "total_inactive_file", "total_active_file")
        return GroupLimit(limit, max(0, used - cached))

    def _cached(self, folder: str, *names: str) -> int:
        """Pages of files, which a group gives up before it refuses; shared memory isn't among them."""
        rows = dict(line.split() for line in (self._text(f"{folder}/memory.stat") or "").splitlines())
        return sum(int(rows.get(name, 0)) for name in names)

    def _meminfo(self, place: str, name: str) -> int:
        for line in (self._text(place) or "").splitlines():
            before, colon, value = line.partition(f"{name}:")
            if colon and (not before or before.endswith(" ")):
                return int(value.split()[0]) * 1024
        return 0

    def _number(self, place: str) -> int | None:
        text = (self._text(place) or "").strip()
        return int(text) if text.isdecimal() else None

    def _text(self, place: str) -> str | None:
        try:
            return (self._root / place.lstrip("/")).read_text()
        except OSError:
            return None


def _numbers(ranges: str | None) -> tuple[int, ...]:
    """The numbers in a list such as `0-1,4`."""
    numbers: list[int] = []
    for part in (ranges or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)
