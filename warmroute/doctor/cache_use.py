"""Does an engine use what it has cached, and is its answer the same then? One long prompt, sent three times.

Cold (its first words were never seen), again (a hit is due), and under a salt that nobody else uses, which reads no
cache. All greedy. If the cold and the salted answer differ, the engine isn't deterministic and nothing is said of the
cache; if these two agree and the hit's differs, the KV that was loaded isn't the KV that was computed.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from directory.chunks import CHUNK_TOKENS_DEFAULT
from gateway.openai_schema import COMPLETIONS
from warmroute.doctor.engine_ids import EngineIds
from warmroute.doctor.finding import Finding, note, right, unknown, wrong
from warmroute.doctor.patient import Patient, Served
from warmroute.doctor.probes import Probe
from warmroute.doctor.reader import Reader, Reply, Unanswered

CACHE = "cache"
REST_TOKENS = 40
"""Beyond one chunk: the last token is always computed, and engines cache blocks of their own size."""
ANSWER_TOKENS = 16
SENTENCE = " Then the tide of day {number} rose to {height} feet, and the boats of the harbour turned their bows."
SENTENCES = 400


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer: its text, the prompt's tokens, and how many of them were cached; `None` where it doesn't say."""

    text: str
    prompt_tokens: int
    cached_tokens: int | None


async def check_cache(reader: Reader, asked: EngineIds, patient: Patient, served: Served) -> list[Finding]:
    """Send the prompt, and judge. Raises `Unanswered`."""
    chunk_tokens = patient.registration.chunk_tokens if patient.registration else CHUNK_TOKENS_DEFAULT
    wanted = chunk_tokens + REST_TOKENS
    if wanted + ANSWER_TOKENS > served.context_tokens:
        return [unknown(CACHE, patient.name, f"a chunk ({chunk_tokens} tokens) doesn't fit its context")]
    prompt = await _prompt(asked, wanted)
    sender = _Sender(reader, patient, served.model)
    cold = await sender.send(prompt)
    if cold is None:
        return [unknown(CACHE, patient.name, "it serves no /v1/completions")]
    warm = await sender.send(prompt)
    salted = await sender.send(prompt, secrets.token_hex(16))
    assert warm is not None, "it answered the same before"
    return judge(patient.name, served.kind, cold, warm, salted)


def judge(subject: str, kind: str | None, cold: Answered, warm: Answered, salted: Answered | None) -> list[Finding]:
    """What the answers say. `salted` is `None` where the engine refuses salts."""
    findings = [_use(subject, kind, cold, warm)]
    is_bypassed = salted is not None and not salted.cached_tokens
    if salted is not None and not is_bypassed:
        says = f"a request with a salt of its own was answered from {salted.cached_tokens} cached tokens of another"
        findings.append(
            wrong(CACHE, subject, says, "update the engine: one that ignores cache_salt can't keep tenants apart")
        )
    if salted is not None and is_bypassed and salted.text != cold.text:
        says = f"greedy answers differ without any cache: {cold.text!r}, then {salted.text!r}"
        mend = "to compare, start it with --dtype float32 or batch-invariant kernels, and nothing else running"
        return [*findings, unknown(CACHE, subject, says, mend)]
    if warm.text != cold.text:
        says = (
            f"OTHER OUTPUT FROM THE CACHE: computed {cold.text!r}, with {warm.cached_tokens} cached tokens "
            f"{warm.text!r}{', and computed again as at first' if is_bypassed else ''}"
        )
        mend = (
            "take this engine out of the fleet, empty its caches (`warmroute forget --identity`, reset_prefix_cache) "
            "and look at its KV dtype, its connector and its attention backend; on a GPU in bfloat16 near-ties can "
            "flip, so repeat it with --dtype float32 before you blame the cache"
        )
        return [*findings, wrong(CACHE, subject, says, mend)]
    with_salt = " and under a salt" if is_bypassed else ""
    findings.append(right(CACHE, subject, f"the same greedy answer cold, from the cache{with_salt}"))
    return findings


def _use(subject: str, kind: str | None, cold: Answered, warm: Answered) -> Finding:
    flags = {"vllm": "--no-enable-prefix-caching", "sglang": "--disable-radix-cache", "reference": "--no-cache"}
    if warm.cached_tokens is None:
        says = "it doesn't report cached tokens: whether predictions come true can't be audited"
        return note(
            CACHE, subject, says, "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
        )
    if not warm.cached_tokens:
        off = flags.get((kind or "").partition("-")[0], "the flag that turned its prefix cache off")
        says = f"{warm.prompt_tokens} tokens sent twice, and none was cached the second time"
        return wrong(CACHE, subject, says, f"turn prefix caching on: start the engine without {off}")
    says = f"of {warm.prompt_tokens} tokens sent twice {warm.cached_tokens} were cached the second time"
    return right(CACHE, subject, f"{says} ({cold.cached_tokens or 0} at first)")


async def _prompt(asked: EngineIds, tokens: int) -> str | list[int]:
    """A prompt that nobody sent before, of so many tokens; as text, of about as many, where ids can't be had."""
    told = await asked.ask(Probe("long", COMPLETIONS, {"prompt": _log()[: tokens * 8]}))
    return list(told.ids[:tokens]) if told.ids is not None else _log()[: tokens * 5]


def _log() -> str:
    text = f"Log {secrets.token_hex(8)}:"
    return text + "".join(SENTENCE.format(number=number, height=number * 7 % 13) for number in range(SENTENCES))


class _Sender:
    def __init__(self, reader: Reader, patient: Patient, model: str) -> None:
        self._reader, self._patient, self._model = reader, patient, model

    async def send(self, prompt: str | list[int], salt: str | None = None) -> Answered | None:
        """The answer; `None` where the engine refuses such a request."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            **({"cache_salt": salt} if salt is not None else {}),
        }
        url = f"{self._patient.url}{COMPLETIONS}"
        reply = await self._reader.post(url, body)
        return None if reply.status in (400, 404, 405, 422) else _answered(reply)


def _answered(reply: Reply) -> Answered:
    table = reply.table()
    try:
        usage, text = table["usage"], table["choices"][0]["text"]
        details: Mapping[str, Any] = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return Answered(str(text), int(usage["prompt_tokens"]), int(cached) if cached is not None else None)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Unanswered(f"{reply.url} answered with something unexpected: {error!r}") from error
