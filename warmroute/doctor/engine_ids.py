"""The token ids that an engine makes of a request, by its own account: rendered, tokenized, or at least counted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.openai_schema import CHAT, COMPLETIONS
from warmroute.doctor.patient import Patient, Served
from warmroute.doctor.probes import PLAIN, Probe
from warmroute.doctor.reader import Reader, Reply, Unanswered

REFUSALS = frozenset({400, 404, 405, 415, 422, 501})
TOKENIZE_CHAT_FIELDS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
     "chat_template_kwargs"}
)  # fmt: skip
"""What vLLM's `/tokenize` reads of a chat: of others it would ignore what shapes the prompt."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the engine says of a request: its ids, or only their count, or why it refuses it."""

    ids: tuple[int, ...] | None = None
    count: int | None = None
    refusal: str | None = None


class EngineIds:
    """Asks one engine, the most exact way that it has: `render`, `tokenize`, or the usage of an answer of one token."""

    def __init__(self, reader: Reader, patient: Patient, served: Served) -> None:
        self._reader, self._patient, self._served = reader, patient, served
        self._renders: bool | None = None
        self._tokenizes = {CHAT: served.kind != "sglang", COMPLETIONS: True}

    async def ask(self, probe: Probe) -> Told:
        """Raises `Unanswered`."""
        if self._renders is None:
            self._renders = (await self._post(f"{PLAIN.endpoint}/render", PLAIN.fields)).is_ok
        if self._renders:
            return _told_ids(await self._post(f"{probe.endpoint}/render", probe.fields), "token_ids")
        if self._tokenizes[probe.endpoint] and (
            probe.endpoint == COMPLETIONS or probe.fields.keys() <= TOKENIZE_CHAT_FIELDS
        ):
            reply = await self._post("/tokenize", probe.fields)
            if reply.status not in (404, 405):
                return _told_ids(reply, "tokens")
            self._tokenizes[probe.endpoint] = False
        return await self.count(probe)

    async def count(self, probe: Probe) -> Told:
        """How many tokens the engine computes for it, from the usage of its answer. Raises `Unanswered`."""
        reply = await self._post(probe.endpoint, {**probe.fields, "max_tokens": 1, "temperature": 0})
        if reply.status in REFUSALS:
            return Told(refusal=reply.said)
        count = (reply.table().get("usage") or {}).get("prompt_tokens")
        if not isinstance(count, int):
            raise Unanswered(f"{reply.url} tells no usage.prompt_tokens")
        return Told(count=count)

    async def _post(self, path: str, fields: Mapping[str, Any]) -> Reply:
        body = {"model": self._served.model, **fields}
        return await self._reader.post(f"{self._patient.url}{path}", body)


def _told_ids(reply: Reply, name: str) -> Told:
    if reply.status in REFUSALS:
        return Told(refusal=reply.said)
    value = reply.value[0] if isinstance(reply.value, list) and reply.value else reply.value
    ids = value.get(name) if reply.is_ok and isinstance(value, Mapping) else None
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise Unanswered(f"{reply.url} answered {reply.status}, without {name}: {reply.said}")
    return Told(tuple(ids), len(ids))
