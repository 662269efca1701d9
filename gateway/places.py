"""Rows of the directory's table by who and where they are: the lives of one host or engine share a name and a place."""

from collections.abc import Sequence

from directory.members import GatewayRegistration, HostRegistration, Member, name_of, place_of


def assumed_of(gateway: Member) -> tuple[str, str]:
    """The engine's name and URL whose placements this life of a gateway's assumes; empty for a gateway's own life."""
    registration = gateway.registration
    assert isinstance(registration, GatewayRegistration)
    return registration.engine, registration.engine_url


def hosts_among(members: Sequence[Member]) -> list[Member]:
    """The hosts among the rows."""
    return [member for member in members if isinstance(member.registration, HostRegistration)]


def member_name(member: Member) -> str:
    """What the host, engine or gateway of a row is called."""
    return name_of(member.registration)


def member_place(member: Member) -> str:
    """Where it is reached."""
    return place_of(member.registration)


def lives_by_place(members: Sequence[Member]) -> dict[tuple[str, str], frozenset[bytes]]:
    """The lives at each (name, place), in one pass: fleets have a thousand hosts."""
    lives: dict[tuple[str, str], set[bytes]] = {}
    for member in members:
        lives.setdefault((member_name(member), member_place(member)), set()).add(member.incarnation)
    return {place: frozenset(found) for place, found in lives.items()}


def is_same_place(one: Member, other: Member) -> bool:
    """Whether two rows are of one name at one place."""
    return (member_name(one), member_place(one)) == (member_name(other), member_place(other))
