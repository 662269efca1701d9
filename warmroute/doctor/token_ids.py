"""Are the gateway's token ids the engine's? Over requests of every kind; keys are only as good as these ids."""

from dataclasses import dataclass

from gateway.encoding.encoder import Encoding
from warmroute.doctor.difference import Difference, difference
from warmroute.doctor.engine_ids import EngineIds, Told
from warmroute.doctor.finding import Finding, note, right, unknown, wrong
from warmroute.doctor.gateway_encoding import NoEncoding, OwnEncoding, OwnEncodings
from warmroute.doctor.patient import Patient, Served
from warmroute.doctor.probes import PLAIN, PROBES, TEXT, Probe

IDS = "ids"
COUNT_CAUSE = "another number of tokens"


@dataclass(frozen=True, slots=True)
class _Compared:
    """A request, and what became of it: `difference` where the ids differ, `why_not` where nothing was compared."""

    probe: Probe
    is_by_ids: bool = False
    difference: Difference | None = None
    why_not: str = ""


async def check_ids(encodings: OwnEncodings, asked: EngineIds, patient: Patient, served: Served) -> list[Finding]:
    """Compare every probe; one finding for each cause of a difference. Raises `Unanswered`."""
    try:
        own = await encodings.of(patient, served.kind)
    except NoEncoding as error:
        if not error.is_fault:
            return [unknown(IDS, patient.name, str(error))]
        return [wrong(IDS, patient.name, str(error), error.mend)]
    compared = [await _compare(own, asked, served, probe) for probe in PROBES]
    compared += [await _compare_count(own, asked, served, probe) for probe in (PLAIN, TEXT)]
    findings = _differences(patient.name, compared)
    equal = [each for each in compared if each.difference is None and not each.why_not]
    if equal and not findings:
        exactly = sum(each.is_by_ids for each in equal)
        says = f"{len(equal)} requests compared: the gateway's tokens are the engine's ({exactly} id for id, "
        findings.append(right(IDS, patient.name, f"{says}{len(equal) - exactly} by their count)"))
    elif not findings:
        findings.append(unknown(IDS, patient.name, "nothing could be compared"))
    return [*findings, *_uncompared(patient.name, compared), *_time(own, patient.name)]


async def _compare(own: OwnEncoding, asked: EngineIds, served: Served, probe: Probe) -> _Compared:
    encoding = await own.encode(probe, served.model, served.context_tokens)
    if encoding.tokens is None or not encoding.is_whole:
        return _Compared(probe, why_not=f"routed by session here ({encoding.reason})")
    return _judged(own, probe, encoding, await asked.ask(probe))


async def _compare_count(own: OwnEncoding, asked: EngineIds, served: Served, probe: Probe) -> _Compared:
    """What is computed, beside what is said: `/tokenize` may leave out what generating adds."""
    encoding = await own.encode(probe, served.model, served.context_tokens)
    if encoding.tokens is None:
        return _Compared(probe, why_not="")
    return _judged(own, probe, encoding, await asked.count(probe))


def _judged(own: OwnEncoding, probe: Probe, encoding: Encoding, told: Told) -> _Compared:
    if told.refusal is not None:
        return _Compared(probe, why_not="refused by the engine")
    ours = tuple(memoryview(encoding.tokens or b"").cast("I"))
    if told.ids is None:
        if told.count == len(ours):
            return _Compared(probe)
        return _Compared(probe, difference=_of_counts(len(ours), told.count or 0))
    if told.ids == ours:
        return _Compared(probe, is_by_ids=True)
    has_template = "messages" in probe.fields
    return _Compared(probe, True, difference(ours, told.ids, own.decode, has_template))


def _of_counts(ours: int, theirs: int) -> Difference:
    shows = f"the engine computes {theirs} tokens, the gateway {ours}"
    cause, more = COUNT_CAUSE, ""
    if theirs == ours + 1:
        cause = "one token more, as of a beginning token that is there twice"
        more = 'the engine adds a beginning token to one that is there already ("add_bos_token"), or '
    other = "it has another chat template or tokenizer than the gateway: see its launch line and its model's files"
    return Difference(cause, shows, more + other)


def _differences(subject: str, compared: list[_Compared]) -> list[Finding]:
    by_cause: dict[str, list[_Compared]] = {}
    for each in compared:
        if each.difference is not None:
            by_cause.setdefault(each.difference.cause, []).append(each)
    findings = []
    for cause, alike in by_cause.items():
        first = alike[0].difference
        assert first is not None, "sorted by it"
        names = ", ".join(dict.fromkeys(each.probe.name for each in alike))
        says = f"other token ids, so nothing matches: {cause} (requests: {names}). {alike[0].probe.name}, {first.shows}"
        findings.append(wrong(IDS, subject, says, first.mend))
    return findings


def _uncompared(subject: str, compared: list[_Compared]) -> list[Finding]:
    """What wasn't: said in one line, with the reasons."""
    by_reason: dict[str, list[str]] = {}
    for each in compared:
        if each.why_not:
            by_reason.setdefault(each.why_not, []).append(each.probe.name)
    if not by_reason:
        return []
    reasons = "; ".join(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in by_reason.items())
    return [unknown(IDS, subject, reasons)]


def _time(own: OwnEncoding, subject: str) -> list[Finding]:
    if not own.tells_time:
        return []
    says = "its chat template tells the date: prompts change at midnight, by the engine's clock and time zone"
    return [note(IDS, subject, says, "give engines and gateways one time zone (TZ=UTC for all)")]
