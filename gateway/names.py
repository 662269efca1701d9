"""Who has a name in the fleet, where several registrations claim it."""

import logging
from collections.abc import Callable, Mapping, Sequence

from directory.members import Member
from gateway.places import is_same_place, member_name, member_place

logger = logging.getLogger(__name__)


class Names:
    """Chooses a row for each name. `on_taken()` hears, once, of each place that claims a name another one has."""

    def __init__(self, on_taken: Callable[[], None]) -> None:
        self._on_taken = on_taken
        self._taken: set[tuple[str, str]] = set()

    def chosen(self, members: Sequence[Member], incumbents: Mapping[str, str]) -> dict[str, Member]:
        """The row to believe of each name: live before lapsed before retired, then the place known so far.

        Two live lives at different places under one name are two parties that don't know of each other: the one that
        came first is kept, and the other is said and counted.
        """
        chosen: dict[str, Member] = {}
        for member in members:
            name = member_name(member)
            held = chosen.get(name)
            if held is None or self._rank(member, incumbents) > self._rank(held, incumbents):
                held, chosen[name] = member, member
            for one in (held, member):
                is_other = one.is_live and chosen[name].is_live and not is_same_place(one, chosen[name])
                if is_other and (name, member_place(one)) not in self._taken:
                    self._taken.add((name, member_place(one)))
                    self._on_taken()
                    logger.error(
                        "the name %s is taken: %s is left out, %s is kept",
                        name,
                        member_place(one),
                        member_place(chosen[name]),
                    )
        return chosen

    def _rank(self, member: Member, incumbents: Mapping[str, str]) -> tuple[bool, bool, bool, float]:
        is_incumbent = incumbents.get(member_name(member)) == member_place(member)
        return member.is_live, not member.retired, is_incumbent, member.remaining_s
