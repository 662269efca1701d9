"""Engines without an agent: their models' folders on this machine, read, watched, and switched when they change."""

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.config import EngineConfig
from gateway.encoding.files import TokenizerFiles
from gateway.encoding.local_model_reader import read_apart
from gateway.encoding.model_files import ModelFiles

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
READS_AT_ONCE_MAX = 2
"""Folders: each is read by a process of its own, which takes some hundred megabytes."""
RETRY_POLLS = 60
"""A folder that couldn't be read, and hasn't changed, is tried again after so many looks."""
ENTRIES_MAX = 4096
_WATCHED = re.compile(
    r"tokenizer.*|chat_template.*|config\.json|special_tokens_map\.json|added_tokens\.json|vocab.*|merges.*|tekken\.json"
    r"|.*\.(model|tiktoken)|consolidated.*\.safetensors"
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")

Look = tuple[tuple[str, int, int, int], ...]


@dataclass(slots=True)
class _Place:
    """One configured tokenizer. `current` is what engines are encoded with, `coming` what is to follow it."""

    owner: str
    tokenizer: str
    kind: str
    seen: Look | None = None
    read: Look | None = None
    polls_since_failure: int = 0
    current: ModelFiles | None = None
    coming: ModelFiles | None = None
    problem: str = ""


class LocalModels:
    """The tokenizers that are configured for engines. `is_loaded` says whether there is an encoder for some files.

    While a folder's new files are loaded the old ones serve; new files that can't be used change nothing.
    """

    def __init__(
        self,
        engines: Sequence[EngineConfig],
        files: TokenizerFiles,
        is_loaded: Callable[[ModelFiles], bool],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._files, self._is_loaded, self._sleep = files, is_loaded, sleep
        self._reads = asyncio.Semaphore(READS_AT_ONCE_MAX)
        self._places: dict[tuple[str, str], _Place] = {}
        self._of_engine: dict[str, _Place] = {}
        self._watches: dict[tuple[str, str], tuple[_Place, asyncio.Task[None]]] = {}
        self._has_changed = asyncio.Event()
        self.configure(engines)

    def configure(self, engines: Sequence[EngineConfig]) -> None:
        """Work for these engines from now on; what is loaded for one that stays is kept."""
        before, self._places, self._of_engine = self._places, {}, {}
        for engine in engines:
            if engine.tokenizer is not None:
                key = engine.tokenizer, engine.kind
                if key not in self._places:
                    self._places[key] = before.get(key) or _Place(f"engines[].tokenizer of {engine.engine}", *key)
                self._of_engine[engine.engine] = self._places[key]
        self._has_changed.set()

    def files_of(self, engine: str) -> ModelFiles | None:
        """What an engine's prompts are encoded with, once that is loaded."""
        place = self._of_engine.get(engine)
        if place is None:
            return None
        if place.coming is not None and self._is_loaded(place.coming):
            if place.current is not None:
                logger.info("%s: its new files are loaded and in use", place.owner)
            place.current, place.coming = place.coming, None
        return place.current

    def wanted(self) -> list[tuple[ModelFiles, str]]:
        """The files to be loaded, as `Encoders.want` takes them."""
        places = self._places.values()
        return [(files, "") for place in places for files in (place.current, place.coming) if files is not None]

    def state(self, engine: str) -> str | None:
        """What keeps an engine's newest files from being in use, in plain words; `None` if nothing does."""
        place = self._of_engine.get(engine)
        if place is None or (not place.problem and place.current is not None and place.coming is None):
            return None
        return place.problem or "loading"

    def coming(self, engine: str) -> ModelFiles | None:
        """Files that are being loaded for an engine."""
        place = self._of_engine.get(engine)
        return place.coming if place else None

    async def run(self) -> None:
        """Watch the folders until cancelled; one whose file system doesn't answer holds up no other."""
        async with asyncio.TaskGroup() as watches:
            while True:
                self._has_changed.clear()
                for key, (watched, watch) in list(self._watches.items()):
                    if self._places.get(key) is not watched:
                        del self._watches[key]
                        watch.cancel()
                for key in self._places.keys() - self._watches.keys():
                    place = self._places[key]
                    self._watches[key] = place, watches.create_task(self._watch(place))
                await self._has_changed.wait()

    async def _watch(self, place: _Place) -> None:
        while True:
            try:
                await self._look_after(place)
            except Exception:  # the edge of the loop: one strange folder must not end the gateway
                logger.exception("%s: looking after its folder met a fault", place.owner)
            await self._sleep(POLL_INTERVAL_S)

    async def _look_after(self, place: _Place) -> None:
        """Read a folder that has changed, once it is the same at two looks: it may be in the middle of being copied."""
        try:
            folder, seen = await asyncio.to_thread(_find_and_look, place.tokenizer)
        except (ValueError, OSError) as error:
            self._note(place, str(error))
            return
        is_settled, place.seen = seen == place.seen or place.read is None, seen
        place.polls_since_failure += 1
        is_due = seen != place.read or (bool(place.problem) and place.polls_since_failure > RETRY_POLLS)
        if not is_settled or not is_due:
            return
        place.read, place.polls_since_failure = seen, 0
        try:
            async with self._reads:
                model = await read_apart(folder, place.kind)
            is_same = await asyncio.to_thread(look, folder) == seen
        except (ValueError, OSError) as error:  # no process could be started, or the folder went away
            self._note(place, f"{folder}: {error}")
            return
        if not is_same:
            place.read = ()  # half of it may be of another model: read it again
            return
        self._note(place, "")
        if model.reason:
            logger.warning("%s: prompts of text can't be routed by prefix: %s", place.owner, model.reason)
        digests = await self._files.hold(place.owner + place.kind, model.contents)
        found = ModelFiles(model.renderer, tuple(sorted(digests.items())))
        place.coming = None if found == place.current else found

    def _note(self, place: _Place, problem: str) -> None:
        if problem and problem != place.problem:
            logger.error("%s: %s", place.owner, problem)
        place.problem = problem


def find_folder(tokenizer: str) -> Path:
    """The folder of a model: a path, or the snapshot in this machine's hub cache of `org/name` or `org/name@revision`.

    Raises `ValueError`. The cache's layout is that of huggingface_hub ("Understand caching").
    """
    try:
        path = Path(tokenizer).expanduser()
    except RuntimeError as error:  # a user that isn't there
        raise ValueError(f"{tokenizer}: {error}") from error
    if path.is_dir():
        return path
    if not _HUB_ID.fullmatch(tokenizer) or ".." in tokenizer:
        raise ValueError(f"{tokenizer} is neither a folder nor a hub id such as org/name")
    name, _, revision = tokenizer.partition("@")
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision
    folder = repository / "snapshots" / commit
    if not commit or not folder.is_dir():
        raise ValueError(f"{tokenizer} is no folder, and not in the hub cache {hub_cache()}; nothing is downloaded")
    return folder


def hub_cache() -> Path:
    """Where huggingface_hub keeps what was downloaded."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("HF_HOME") or os.path.join(base, "huggingface")).expanduser() / "hub"


def _find_and_look(tokenizer: str) -> tuple[Path, Look]:
    folder = find_folder(tokenizer)
    return folder, look(folder)


def look(folder: Path) -> Look:
    """What tells that a folder's files changed, without reading them. Raises `OSError`, `ValueError` without any.

    A link that leads nowhere is no file: so take it who load models.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry, _ in zip(entries, range(ENTRIES_MAX), strict=False):
            if _WATCHED.fullmatch(entry.name):
                try:
                    status = os.stat(entry.path)  # of what a link leads to
                except FileNotFoundError:
                    continue
                found.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
    if not found:
        raise ValueError(f"{folder} holds no tokenizer")
    return tuple(sorted(found))
