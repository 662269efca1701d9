"""Who is registered, and what of it doesn't fit together: pure, over the directory's table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from directory.members import EngineRegistration, GatewayRegistration, Member, name_of, place_of, role_of
from gateway.lookup import CHAINS_MAX
from warmroute.doctor.finding import Finding, counted, note, right, wrong

IDENTITIES = "identities"
_RULES: tuple[tuple[Mapping[str, str], bool, Callable[[str, str, str, str], Finding], str, str], ...] = (
    (
        {"weights_sha": "weights", "tokenizer_sha": "tokenizer"},
        True,
        wrong,
        "the same question gets another's answer",
        "serve one set of files under one name: give the others a name of their own (--served-model-name), or finish "
        "their rollout",
    ),
    (
        {"kv_dtype": "KV type", "layout": "KV layout", "tp_size": "number of shards"},
        True,
        note,
        "they can't use each other's chunks",
        "start them with the same --dtype, --kv-cache-dtype, parallel sizes and version, where they should share",
    ),
    (
        {"chunk_tokens": "chunk size", "key_scheme": "key scheme", "page_tokens": "page size"},
        False,
        note,
        "every prompt must be named once for each",
        "start them with one chunk size and one key scheme",
    ),
)
"""What must, or had better, be equal in all engines of a model: fields, of the identity or the registration itself."""


def check_table(members: Sequence[Member], unreadable: Mapping[bytes, str]) -> list[Finding]:
    """What the table itself tells. Gateways come and go: a row that one left behind is no trouble."""
    findings = [_unreadable(incarnation, reason) for incarnation, reason in unreadable.items()]
    current = [m for m in members if not m.retired and not isinstance(m.registration, GatewayRegistration)]
    names: dict[tuple[str, str], list[Member]] = {}
    for member in current:
        names.setdefault(_role_and_name(member), []).append(member)
    for (role, name), lives in names.items():
        live = [member for member in lives if member.is_live]
        places = sorted({_place(member) for member in live})
        if len(places) > 1:
            says = f"{len(places)} {role}s go by this name, at {' and '.join(places)}: gateways believe but one"
            field = "host in the agent's configuration" if role == "host" else "the engine's name in its launch line"
            findings.append(wrong(IDENTITIES, name, says, f"give each a name of its own ({field}), and restart it"))
        if not live:
            findings.append(_lapsed(role, name, lives))
        if any(member.load.is_directory_full for member in live):
            says = "its placements are refused: the directory's server has no memory left"
            findings.append(wrong(IDENTITIES, name, says, "raise maxmemory of the directory's server"))
    engines = [
        member.registration
        for member in current
        if member.is_live and isinstance(member.registration, EngineRegistration)
    ]
    findings += check_engines(engines)
    if not members and not findings:
        mend = "start agents with this directory and key prefix; see --key-prefix, if they have another"
        findings.append(note(IDENTITIES, "the table", "nobody is registered here", mend))
    elif not findings:
        hosts = sum(role == "host" for role, _ in names)
        there = f"{counted(hosts, 'host')} and {counted(len(names) - hosts, 'engine')}"
        says = f"{there}, registered and live, that go together"
        findings.append(right(IDENTITIES, "the table", says))
    return findings


def check_engines(engines: Sequence[EngineRegistration]) -> list[Finding]:
    """Engines that serve one model, and aren't alike."""
    findings = []
    by_model: dict[str, dict[str, EngineRegistration]] = {}
    for engine in engines:
        for model in engine.models:
            by_model.setdefault(model, {})[engine.engine] = engine
    for model, alike in by_model.items():
        for fields, of_identity, finding, consequence, mend in _RULES:
            findings += [
                finding(IDENTITIES, model, f"its engines have different {differs}: {consequence}", mend)
                for differs in _differing(alike, fields, of_identity)
            ]
        kinds = {(each.identity, each.key_scheme, each.chunk_tokens, each.page_tokens) for each in alike.values()}
        if len(kinds) > CHAINS_MAX:
            says = f"its engines name chunks in {len(kinds)} ways: gateways follow {CHAINS_MAX}, the rest never match"
            findings.append(wrong(IDENTITIES, model, says, "make engines of one model alike"))
    return findings


def check_versions(versions: Mapping[str, str]) -> list[Finding]:
    """Versions of warmroute, by part."""
    if not versions:
        return []
    by_version: dict[str, list[str]] = {}
    for part, version in versions.items():
        by_version.setdefault(version, []).append(part)
    if len(by_version) == 1:
        return [
            right(IDENTITIES, "versions", f"{counted(len(versions), 'part')}, of warmroute {next(iter(by_version))}")
        ]
    words = "; ".join(f"{version}: {', '.join(sorted(parts))}" for version, parts in sorted(by_version.items()))
    return [note(IDENTITIES, "versions", f"parts of different versions: {words}", "finish the upgrade")]


def _differing(alike: Mapping[str, EngineRegistration], fields: Mapping[str, str], of_identity: bool) -> list[str]:
    """For each field in which the engines differ: its name, and which engine has what."""
    found = []
    for field, word in fields.items():
        values: dict[Any, list[str]] = {}
        for name, engine in alike.items():
            values.setdefault(getattr(engine.identity if of_identity else engine, field), []).append(name)
        if len(values) > 1:
            words = "; ".join(f"{', '.join(sorted(names))}: {str(value)[:24]}" for value, names in values.items())
            found.append(f"{word} ({words})")
    return found


def _unreadable(incarnation: bytes, reason: str) -> Finding:
    says = f"a registration can't be read, and nobody routes there: {reason}"
    mend = (
        "mend what its agent registers: chunk_tokens must be a multiple of the engine's block size (page_tokens), and "
        "agents mustn't be newer than what reads their rows"
    )
    return wrong(IDENTITIES, f"life {incarnation.hex()}", says, mend)


def _lapsed(role: str, name: str, lives: Sequence[Member]) -> Finding:
    since_s = -max(member.remaining_s for member in lives)
    says = f"this {role}'s registration lapsed {max(since_s, 0):.0f} s ago: what it holds isn't believed"
    mend = (
        "see whether its agent runs and reaches the directory; of a machine that is gone for good, "
        f"`warmroute directory forget {name}`"
    )
    return wrong(IDENTITIES, name, says, mend)


def _role_and_name(member: Member) -> tuple[str, str]:
    return role_of(member.registration), name_of(member.registration)


def _place(member: Member) -> str:
    return place_of(member.registration)
