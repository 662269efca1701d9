"""Engines that are known twice: by their agent's registration, and from a list that knows their address only."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from directory.members import EngineRegistration


class Placed(Protocol):
    """An engine at an address; `registration` is `None` where no agent tells of it."""

    @property
    def url(self) -> str:
        """Its base URL."""
        ...

    @property
    def registration(self) -> EngineRegistration | None:
        """What its agent says."""
        ...


Each = TypeVar("Each", bound=Placed)


def without_twins(engines: Mapping[str, Each]) -> Mapping[str, Each]:
    """Without those that an agent tells of under another name at the same address: they would have twice the load."""
    told = {view.url.rstrip("/") for view in engines.values() if view.registration is not None}
    return {name: view for name, view in engines.items() if view.registration is not None or view.url not in told}
