"""Finds out which engines take token ids in place of text, by asking each: a loop in the background, off by default.

Two questions, each a request for one token. Does the engine make the same ids of a prompt as the gateway? If not (it
was started with another template, say), ids sent to it would change its answers. And which does it take of a long text
and a few ids that aren't that text's? `usage.prompt_tokens` tells. A verdict holds for one life of the engine: it is
asked again when it was unwell, has a new incarnation, is somewhere else, or its prompts are encoded by other files.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from gateway.encoding.encoder import Encoders
from gateway.encoding.model_files import ModelFiles
from gateway.fleet import EngineView, FleetTable
from gateway.ids_body import field_for, spliced
from gateway.openai_schema import CHAT, COMPLETIONS, parse_request

logger = logging.getLogger(__name__)

ENDPOINTS = (CHAT, COMPLETIONS)
INTERVAL_S = 1.0
RETRY_S, RETRY_S_MAX = 4.0, 300.0
"""After a probe without a verdict, the pause doubles from one to the other."""
TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = 2**20
ENGINES_AT_ONCE_MAX = 8
TAKEN, IGNORED, REFUSED, OTHERS = "taken", "ignored", "refused", "has other ids for a prompt"
REFUSALS = frozenset({400, 404, 405, 422, 501})
"""Statuses that say that an engine won't have this."""
SHORT_TEXT = "Hello"
LONG_TEXT = "This text isn't the one that the token ids say. " * 8
TURNS = (("user", LONG_TEXT), ("assistant", "Yes."), ("user", "And now?"))
ASKS_FOR_IDS = frozenset({"vllm", "vllm-own", "vllm-unknown"})
"""Kinds of engines that say the prompt's ids when they are asked with `return_token_ids`."""


@dataclass(slots=True)
class _Verdicts:
    """What is known of one life of an engine, by endpoint."""

    url: str
    files: ModelFiles | None
    lives: frozenset[bytes]
    by_endpoint: dict[str, str] = field(default_factory=dict)
    tries: int = 0
    next_try_at: float = 0.0


class IdsProbe:
    """Verdicts on engines. `is_on` false: it asks nobody, and nobody takes ids."""

    def __init__(
        self,
        is_on: bool,
        encoders: Encoders,
        client: httpx.AsyncClient,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._is_on, self._encoders, self._client, self._clock, self._sleep = is_on, encoders, client, clock, sleep
        self._verdicts: dict[str, _Verdicts] = {}
        self._views: tuple[EngineView, ...] = ()

    def takes(self, view: EngineView, endpoint: str) -> bool:
        """Whether this engine takes ids at this endpoint, as it is now."""
        known = self._verdicts.get(view.engine)
        if known is None or (known.url, known.files) != (view.url, view.files):
            return False
        return known.by_endpoint.get(endpoint) == TAKEN

    def note_refusal(self, view: EngineView, endpoint: str) -> None:
        """It refused ids in a request that it takes without them: it gets none at this endpoint while it lives."""
        known = self._verdicts.get(view.engine)
        if known is not None and known.by_endpoint.get(endpoint) != REFUSED:
            known.by_endpoint[endpoint] = REFUSED
            logger.warning(
                "the engine %s refused a prompt's token ids at %s: it gets text from now on", view.engine, endpoint
            )

    def state(self, view: EngineView) -> str | dict[str, str]:
        """In plain words, for `/fleet`: `off`, or the verdict on each endpoint."""
        if not self._is_on:
            return "off"
        known = self._verdicts.get(view.engine)
        verdicts = known.by_endpoint if known else {}
        return {endpoint: verdicts.get(endpoint, "not known yet") for endpoint in self._endpoints(view)}

    def see(self, table: FleetTable) -> None:
        """Note who is in the fleet, and forget what was found of former lives."""
        if not self._is_on:
            return
        self._views = tuple(view for view in table.engines.values() if view.is_ready and view.files and view.models)
        for view in self._views:
            known, lives = self._verdicts.get(view.engine), view.reach.own
            is_another = known is None or (known.url, known.files) != (view.url, view.files)
            if known is None or is_another or (known.lives and lives and not known.lives & lives):
                self._verdicts[view.engine] = _Verdicts(view.url, view.files, lives)
            elif lives:
                known.lives = lives  # a walk: the next life of the same process
        for gone in self._verdicts.keys() - {view.engine for view in self._views}:
            del self._verdicts[gone]

    async def run(self) -> None:
        """Probe whoever isn't known, until cancelled."""
        while self._is_on:
            try:
                await self.probe_all()
            except Exception:  # the edge of the loop: one strange engine must not end the gateway
                logger.exception("probing engines for token ids met a fault")
            await self._sleep(INTERVAL_S)

    async def probe_all(self) -> None:
        """Probe every engine that is due, once. A fault with one is raised when all have been probed."""
        now = self._clock()
        due = [view for view in self._views if self._is_due(view, now)]
        probes = [self._probe(view) for view in due[:ENGINES_AT_ONCE_MAX]]
        ends = await asyncio.gather(*probes, return_exceptions=True)
        for fault in ends:
            if fault is not None:
                raise fault

    def _is_due(self, view: EngineView, now: float) -> bool:
        known = self._verdicts.get(view.engine)
        return known is not None and now >= known.next_try_at and any(self._unknown(view, known))

    def _unknown(self, view: EngineView, known: _Verdicts) -> Iterable[str]:
        return [endpoint for endpoint in self._endpoints(view) if endpoint not in known.by_endpoint]

    def _endpoints(self, view: EngineView) -> list[str]:
        kind = view.files.renderer if view.files else ""
        return [endpoint for endpoint in ENDPOINTS if field_for(endpoint, kind) is not None]

    async def _probe(self, view: EngineView) -> None:
        known = self._verdicts.get(view.engine)
        if known is None:
            return  # it went meanwhile
        try:
            for endpoint in self._unknown(view, known):
                verdict = await self._verdict(view, endpoint)
                if verdict is not None:
                    known.by_endpoint[endpoint] = verdict
                    logger.info("the engine %s, sent token ids at %s: %s", view.engine, endpoint, verdict)
        finally:
            known.next_try_at = self._clock() + min(RETRY_S * 2**known.tries, RETRY_S_MAX)
            known.tries = min(known.tries + 1, 16)

    async def _verdict(self, view: EngineView, endpoint: str) -> str | None:
        """The verdict, or `None` where there is none yet."""
        assert view.files is not None
        text: dict[str, Any] = {"prompt": LONG_TEXT}
        if endpoint == CHAT:
            text = {"messages": [{"role": role, "content": content} for role, content in TURNS]}
        fields = {"model": view.models[0], "max_tokens": 1, "temperature": 0, **text}
        expected = await self._ids(view, endpoint, fields)
        few = await self._ids(view, COMPLETIONS, {**fields, "prompt": SHORT_TEXT})
        template = field_for(endpoint, view.files.renderer)
        if not expected or not few or template is None:
            return None
        asks = {"return_token_ids": True} if view.files.renderer in ASKS_FOR_IDS else {}
        status, told = await self._ask(view, endpoint, orjson.dumps({**fields, **asks}))
        if status in REFUSALS:
            return REFUSED
        if told is None or not told.is_of(expected):
            return None if told is None else OTHERS
        status, told = await self._ask(view, endpoint, spliced(orjson.dumps(fields), template, few))
        if status in REFUSALS:
            return REFUSED
        return None if told is None else TAKEN if told.is_of(few) else IGNORED

    async def _ids(self, view: EngineView, endpoint: str, fields: dict[str, Any]) -> bytes:
        """The ids of a prompt; empty while it can't be encoded."""
        assert view.files is not None
        encoder = self._encoders.find(view.files)
        if encoder is None:
            return b""
        encoding = await encoder.encode(parse_request(endpoint, orjson.dumps(fields)), view.context_tokens)
        return encoding.tokens or b"" if encoding.is_whole else b""

    async def _ask(self, view: EngineView, endpoint: str, content: bytes) -> tuple[int, "_ToldPrompt | None"]:
        """The status (0 for none), and what the engine says of the prompt that it took, if it says anything."""
        headers = {"content-type": "application/json"}
        if view.api_key:
            headers["authorization"] = f"Bearer {view.api_key}"
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._client.stream(
                    "POST", view.url + endpoint, content=content, headers=headers, timeout=None
                ) as answer,
            ):
                said = bytearray()
                async for piece in answer.aiter_bytes():
                    said += piece
                    if len(said) > ANSWER_BYTES_MAX:
                        return 0, None
                return answer.status_code, _read_prompt(bytes(said)) if answer.status_code == 200 else None
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError):
            return 0, None


@dataclass(frozen=True, slots=True)
class _ToldPrompt:
    """What an engine says of a prompt: how many ids, and perhaps which."""

    count: int
    ids: list[int] | None

    def is_of(self, tokens: bytes) -> bool:
        """Whether it is the prompt of these ids, as far as it is told."""
        if self.ids is not None:
            return self.ids == list(memoryview(tokens).cast("I"))
        return self.count == len(tokens) // 4


def _read_prompt(content: bytes) -> _ToldPrompt | None:
    """Raises `ValueError` for what isn't JSON."""
    decoded = orjson.loads(content)
    if not isinstance(decoded, dict):
        return None
    usage, ids, choices = decoded.get("usage"), decoded.get("prompt_token_ids"), decoded.get("choices")
    if ids is None and isinstance(choices, list) and choices and isinstance(choices[0], dict):
        ids = choices[0].get("prompt_token_ids")  # of a completion
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return _ToldPrompt(counted, ids if isinstance(ids, list) else None) if isinstance(counted, int) else None
