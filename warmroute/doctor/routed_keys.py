"""Does a gateway name a prompt's chunks as its engine's ids would? Asked with `/route/explain`: nothing is sent.

The doctor's own encoding may differ from a gateway's that has run for days, with other files or an older release. So
the gateway's keys of one long conversation are compared with those that follow from the ids that the engine tells.
"""

import secrets

from directory.chunks import pack_tokens, usable_chunks
from directory.identity import UNSCOPED
from directory.members import EngineRegistration
from directory.schemes import key_scheme
from gateway.openai_schema import CHAT
from warmroute.doctor.engine_ids import EngineIds
from warmroute.doctor.finding import Finding, right, unknown, wrong
from warmroute.doctor.patient import Served
from warmroute.doctor.probes import Probe
from warmroute.doctor.reader import Reader

IDS = "ids"
SENTENCE = " The tide of day {number} rose to {height} feet."
SENTENCES = 120


async def check_routed_keys(
    reader: Reader, admin_url: str, engine: EngineRegistration, asked: EngineIds, served: Served
) -> list[Finding]:
    """Compare for the model that this engine serves. Raises `Unanswered`."""
    subject = f"gateway, {engine.engine}"
    sentences = min(SENTENCES, served.context_tokens // 48)
    text = "".join(SENTENCE.format(number=number, height=number * 7 % 13) for number in range(sentences))
    messages = [{"role": "user", "content": f"Log {secrets.token_hex(8)}:{text}"}]
    probe = Probe("long", CHAT, {"messages": messages})
    told = await asked.ask(probe)
    if told.ids is None:
        return [unknown(IDS, subject, "the engine doesn't tell its ids, only their number")]
    body = {"model": served.model, **probe.fields}
    explained = (await reader.post(f"{admin_url}/route/explain", body)).table()
    if explained.get("encoding") != "exact":
        says = f"the gateway encodes a plain conversation as {explained.get('encoding')}"
        return [wrong(IDS, subject, says, "see this gateway's /fleet, `encoding`, and its log")]
    keys = explained.get("directory_keys")
    expected = directory_keys(engine, told.ids)
    if keys == expected:
        return [right(IDS, subject, f"its {len(expected)} keys of a conversation are those of the engine's ids")]
    if explained.get("engine") != engine.engine and keys is not None and len(keys) == len(expected):
        return [unknown(IDS, subject, "it would send this elsewhere, where chunks are named in another way")]
    says = (
        f"its keys of a conversation aren't those of the engine's ids, so nothing matches "
        f"({explained.get('prompt_tokens')} tokens here, {len(told.ids)} there)"
    )
    mend = "see the other `ids` findings; if there are none, restart the gateway: it runs another release, or old files"
    return [wrong(IDS, subject, says, mend)]


def directory_keys(engine: EngineRegistration, ids: tuple[int, ...]) -> list[str]:
    """Under which keys the chunks of these ids are announced, in hex."""
    scheme, digest = key_scheme(engine.key_scheme), engine.identity.fleet_digest()
    digests = scheme.digests(digest, UNSCOPED, pack_tokens(ids), engine.chunk_tokens, engine.page_tokens)
    usable = digests[: usable_chunks(len(ids), engine.chunk_tokens)]
    return [key.hex() for key in scheme.directory_keys(digest, UNSCOPED, usable)]
