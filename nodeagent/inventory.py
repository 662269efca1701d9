"""What one life should have announced: directory keys and their tiers, in order of use."""

from collections import Counter, OrderedDict
from collections.abc import Iterator


class Inventory:
    """Directory key -> tier mask, most recently used last. At most `keys_max` keys; more are not taken."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._masks)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._masks)

    def mask(self, key: bytes) -> int:
        """In which tiers `key` is; 0 for none."""
        return self._masks.get(key, 0)

    def held_in(self, tier: int) -> int:
        """How many keys are in `tier`."""
        return sum(count for mask, count in self._counts.items() if mask & tier)

    def set(self, key: bytes, mask: int) -> bool:
        """Note the newest state of a key, as the most recently used. Returns whether the state is new."""
        before = self._masks.get(key, 0)
        if not mask:
            self._masks.pop(key, None)
        elif before or len(self._masks) < self._keys_max:
            self._masks[key] = mask
            self._masks.move_to_end(key)
        else:
            return False
        self._counts[before] -= 1
        self._counts[mask] += 1
        return mask != before

    def newest_first(self) -> list[bytes]:
        """All keys, most recently used first."""
        return list(reversed(self._masks))
