"""What operators are told of encoding: how exactly each engine's prompts are, and how far each set of files is."""

from collections.abc import Iterable
from typing import Any

from gateway.encoding.encoder import Encoders
from gateway.encoding.local_models import LocalModels
from gateway.encoding.model_files import ModelFiles
from gateway.fleet import EngineView


class EncodingReport:
    """Rows for `/fleet`."""

    def __init__(self, encoders: Encoders, local_models: LocalModels) -> None:
        self._encoders, self._local_models = encoders, local_models

    def of_engine(self, view: EngineView) -> dict[str, Any]:
        """How one engine's prompts are encoded, or why not; and what is to follow."""
        files, problem = view.files, self._local_models.state(view.engine)
        coming = self._local_models.coming(view.engine)
        state = "no agent" if files is None else self._encoders.state(files)
        if problem is not None:
            if coming is not None and problem == "loading" and self._encoders.find(coming) is None:
                problem = self._encoders.state(coming)
            state = problem if files is None else f"{state}; new files: {problem}"
        return {
            "encoding": state,
            "tokenizer": None if files is None else self._encoders.tokenizer_state(files),
            "tokenizer_digest": None if files is None else files.short,
        }

    def of_files(self, views: Iterable[EngineView]) -> list[dict[str, Any]]:
        """Each set of files that is worked with: how far its encoder is, since when, and for whom."""
        engines: dict[ModelFiles, list[str]] = {}
        for view in views:
            for files in (view.files, self._local_models.coming(view.engine)):
                if files is not None:
                    engines.setdefault(files, []).append(view.engine)
        return [
            {
                "renderer": files.renderer,
                "tokenizer_digest": files.short,
                "state": progress.state,
                "reason": progress.reason or None,
                "since_seconds": round(seconds, 1),
                "engines": sorted(engines.get(files, [])),
            }
            for files, progress, seconds in self._encoders.progress()
        ]
