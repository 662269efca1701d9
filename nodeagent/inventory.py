"""What one life should have announced: directory keys and their tiers, in order of use within each partition."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import chain

from directory.placements import PARTITIONS, partition_of


class Inventory:
    """Directory key -> tier mask, most recently used last. At most `keys_max` keys; more are not taken."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._keys = 0
        self._masks: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(PARTITIONS)]
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._keys

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._masks)

    def mask(self, key: bytes) -> int:
        """In which tiers `key` is; 0 for none."""
        return self._masks[partition_of(key)].get(key, 0)

    def held_in(self, tier: int) -> int:
        """How many keys are in `tier`."""
        return sum(count for mask, count in self._counts.items() if mask & tier)

    def keys_in(self, partition: int) -> int:
        """How many keys are of one partition."""
        return len(self._masks[partition])

    def set(self, key: bytes, mask: int) -> bool:
        """Note the newest state of a key, as the most recently used. Returns whether the state is new."""
        masks = self._masks[partition_of(key)]
        before = masks.get(key, 0)
        if mask == before:
            if mask:
                masks.move_to_end(key)
            return False
        if not mask:
            masks.pop(key, None)
        elif before or self._keys < self._keys_max:
            masks[key] = mask
            masks.move_to_end(key)
        else:
            return False
        self._keys += bool(mask) - bool(before)
        self._counts[before] -= 1
        self._counts[mask] += 1
        return True

    def newest_first(self, partition: int) -> list[bytes]:
        """All keys of one partition, most recently used first."""
        return list(reversed(self._masks[partition]))
