"""The tiers a chunk can be in, fastest first, and the bit mask that says which of them hold it."""

import enum
from functools import cache


class Tier(enum.IntFlag):
    """Tiers as bits of a placement's mask; a smaller bit is a faster tier."""

    GPU = 1
    DRAM = 2
    NVME = 4
    SHARED = 8

    @property
    def label(self) -> str:
        """The name in metrics, headers and documents."""
        return (self.name or "").lower()


TIERS = (Tier.GPU, Tier.DRAM, Tier.NVME)
HOST_TIERS = Tier.DRAM | Tier.NVME


_BY_BIT = {tier.value: tier for tier in Tier}


@cache
def fastest(mask: int) -> Tier | None:
    """The fastest tier in `mask`, or `None` where it is empty or holds no known tier."""
    return _BY_BIT.get(mask & -mask)


@cache
def tier_names(mask: int) -> tuple[str, ...]:
    """The names of the tiers in `mask`, fastest first."""
    return tuple(tier.label for tier in Tier if tier & mask)
