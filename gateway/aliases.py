"""Names for models, and splits of a name among several: which model a request for an alias is served by.

A split is by session: all requests of one conversation go to one model, on every gateway alike, by rendezvous hashing
with weights (of each model the draw is `weight / -ln(h)`, h a hash in (0, 1); the largest wins), so a model that comes,
goes or gets another weight moves no more conversations than it must. Sessions are those that clients name, else all up
to the first user message counts. The engine is asked for its model, and its answer, which names that model, isn't
changed: it says which one it was.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from gateway.affinity import conversation_key
from gateway.body_model import with_model
from gateway.config import AliasTarget, ModelsConfig
from gateway.errors import ModelNotFound, NoEngineAvailable, quoted
from gateway.fleet import Fleet
from gateway.preparation import Incoming
from gateway.response_homes import ResponseHomes


class Aliases:
    """The aliases in force."""

    def __init__(self, config: ModelsConfig, fleet: Fleet, homes: ResponseHomes) -> None:
        self._config, self._fleet, self._homes = config, fleet, homes

    def configure(self, config: ModelsConfig) -> None:
        """These are in force for requests that come from now on."""
        self._config = config

    @property
    def names(self) -> Collection[str]:
        """What is an alias."""
        return self._config.aliases.keys()

    def served(self, alias: str) -> list[AliasTarget]:
        """Those of an alias's models that engines serve now, with the ones to turn to only where there is no other."""
        table = self._fleet.table
        targets = self._config.aliases[alias]
        return [each for each in targets if table.serving(each.model) or table.doubtful(each.model)]

    def resolved(self, incoming: Incoming) -> Incoming:
        """The request with a model in place of an alias; a model that is no alias stays. Raises `GatewayError`."""
        request = incoming.request
        alias = request.model
        if alias not in self._config.aliases:
            return incoming
        targets = self.served(alias)
        if not targets:
            if any(each.model in self._fleet.models_seen for each in self._config.aliases[alias]):
                raise NoEngineAvailable(f"no engine that serves {quoted(alias)} is ready")
            raise ModelNotFound(f"the model {quoted(alias)} is not served here", "model")
        home = self._fleet.table.engines.get(self._homes.engine_before(request) or "")
        at_home = [each for each in targets if home is not None and each.model in home.models]
        targets = at_home or [each for each in targets if each.weight] or targets
        key = conversation_key(request, incoming.headers) if len(targets) > 1 else b""
        return replace(incoming, request=with_model(request, chosen(targets, key)))


def chosen(targets: Sequence[AliasTarget], key: bytes) -> str:
    """The model of the one that `key` draws; weights that are all 0 count as alike."""
    is_even = not any(each.weight for each in targets)

    def draw(target: AliasTarget) -> float:
        digest = hashlib.sha256(key + target.model.encode()).digest()
        h = (int.from_bytes(digest[:6], "big") + 0.5) / 2**48
        return (1.0 if is_even else target.weight) / -math.log(h)

    return max(targets, key=draw).model
