"""`/v1/models`: the models of all ready engines, each once, and the aliases that lead to them."""

from typing import Any

from gateway.aliases import Aliases
from gateway.fleet import EngineView, Fleet


class ModelList:
    """What clients can ask for now."""

    def __init__(self, fleet: Fleet, aliases: Aliases) -> None:
        self._fleet, self._aliases = fleet, aliases

    def is_known(self, model: str) -> bool:
        """Whether a model was served at any time, or is an alias: how many names there are is bounded."""
        return model in self._fleet.models_seen or model in self._aliases.names

    def rows(self) -> list[dict[str, Any]]:
        """In OpenAI's shape, with vLLM's further fields, by id."""
        views: dict[str, list[EngineView]] = {}
        for view in self._fleet.table.engines.values():
            for model in view.models if view.is_ready else ():
                views.setdefault(model, []).append(view)
        rows = {model: _row(model, serving) for model, serving in views.items()}
        for alias in self._aliases.names:
            served = [each.model for each in self._aliases.served(alias) if each.model in views]
            if served:
                contexts = [length for each in served if (length := _context_tokens(views[each])) is not None]
                rows[alias] = {
                    **_row(alias, ()),
                    "root": served[0],
                    "max_model_len": min(contexts, default=None) if len(contexts) == len(served) else None,
                }
        return [rows[model] for model in sorted(rows)]


def _row(model: str, views: list[EngineView] | tuple[()]) -> dict[str, Any]:
    registered = (view.registration for view in views if view.registration is not None)
    known = next(registered, None)
    return {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "warmroute",
        "root": known.identity.model_id if known is not None else model,
        "parent": next((view.adapters[model] for view in views if model in view.adapters), None),
        "max_model_len": _context_tokens(views),
    }


def _context_tokens(views: list[EngineView] | tuple[()]) -> int | None:
    """The longest context of those engines that say theirs: a prompt is refused where it fits into none."""
    told = [view.listed_context if view.registration is None else view.registration.context_tokens for view in views]
    return max((each for each in told if each is not None), default=None)
