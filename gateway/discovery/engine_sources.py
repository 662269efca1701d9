"""All engines without an agent: those in the configuration, and those that were discovered, under one name each."""

from collections.abc import Callable, Sequence

from directory.hardware import Hardware
from gateway.config import EngineConfig, KubernetesConfig
from gateway.discovery.endpoint_slices import Endpoint

OnChange = Callable[[tuple[EngineConfig, ...], Hardware], None]


class EngineSources:
    """Tells `on_change` all engines, and the table of hardware, whenever one of the sources changes.

    Configured engines come first, and keep their names and addresses; of several sources that tell of the same address
    the first counts, and a name that is taken is replaced by the address.
    """

    def __init__(self, static: Sequence[EngineConfig], hardware: Hardware, on_change: OnChange) -> None:
        self._static, self._hardware, self._on_change = tuple(static), hardware, on_change
        self._discovered: dict[int, tuple[EngineConfig, ...]] = {}

    def configure(self, static: Sequence[EngineConfig], hardware: Hardware) -> None:
        """These are configured from now on."""
        self._static, self._hardware = tuple(static), hardware
        self._on_change(self.engines(), hardware)

    def discovered(self, number: int, source: KubernetesConfig, endpoints: Sequence[Endpoint]) -> None:
        """These are behind the source of that number from now on."""
        self._discovered[number] = tuple(source.engine_at(each.name, each.place) for each in endpoints)
        self._on_change(self.engines(), self._hardware)

    def engines(self) -> tuple[EngineConfig, ...]:
        """Every engine, each name and each address once."""
        found: dict[str, EngineConfig] = {}
        urls = set[str]()
        of_sources = [each for _, engines in sorted(self._discovered.items()) for each in engines]
        for each in (*self._static, *of_sources):
            if each.url not in urls:
                urls.add(each.url)
                named = each.model_copy(update={"name": None}) if each.engine in found else each
                found.setdefault(named.engine, named)
        return tuple(found.values())
