"""Who is in the fleet: hosts and engines, as an agent registers them and as a reader finds them.

An *incarnation* is one life of a host or an engine: 64 random bits drawn by its writer and never used twice, so that
what an earlier life announced can't be mistaken for the present one's.
"""

import json
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from directory.costs import ModelShape, Rates
from directory.errors import DirectoryError, IdentityRefused
from directory.identity import Identity
from directory.schemes import SCHEMES
from directory.tiers import Tier

INCARNATION_BYTES = 8
TERM_S = 5.0
TERM_MAX_S = 60.0
"""No writer may ask for a longer term: readers take more for a clock that went back."""
RENEW_INTERVAL_S = 1.0
POLL_INTERVAL_S = 0.5
REMEMBERED_S = 600.0
"""How long a retired or lapsed incarnation stays in the table, and how long a partition remembers one that it doesn't
hear of: after that its name is no longer refused, and its holders go from the records that are written."""

DECODED_MAX = 32_768
"""Registrations kept decoded: a thousand hosts with engines and walks; decoding them would be 7% of a core."""

TEXT_CHARS_MAX = 4096
NUMBER_MAX, NUMBER_MIN = 10**19, 1e-6
"""Bounds on what a row of the table may say; what divides is at least `NUMBER_MIN`, or quotients would be infinite."""
PEERS_REPORTED_MAX = 64
PEER_ADDRESS_CHARS_MAX = 263
"""Other hosts in one load report, and the length of an address: a DNS name of 255 characters, a colon and a port."""
BOOKED_NUMBERS, IDLE_NUMBERS = 9, 2
BOOKED_SERVICE_S_MAX, BOOKED_AGE_S_MAX, BOOKED_RUNNING_MAX = 3600.0, 3600.0, 100_000
"""Of one request the predicted seconds, of what happened the age that is told, and of one gateway the open requests on
an engine: with more of any a report is nonsense. Were it believed, all engines could look busy beyond comparison."""
ROW_BYTES_MAX = 2**20
"""A registration or a load report that is longer isn't read: what is unreadable would be parsed at every poll."""
ENGINES_BOOKED_MAX = 1024
"""Engines in one gateway's report of what it booked; a full one is 100 kB."""


def draw_incarnation() -> bytes:
    """8 random bytes: a name for a new life."""
    return secrets.token_bytes(INCARNATION_BYTES)


@dataclass(frozen=True, slots=True)
class HostRegistration:
    """One machine with one agent. `agent_url` serves tokenizer files, metrics and health.

    `peer_address` (`host:port`) is where other hosts' agents fetch its chunks; `None` where they can't.
    """

    host: str
    agent_url: str
    peer_address: str | None = None


@dataclass(frozen=True, slots=True)
class EngineRegistration:
    """One serving endpoint, one data-parallel rank, and all that gateways derive from it.

    `models` are the served model ids; `tokenizer_files` maps a file's name to the sha256 of its content, under which
    the host's agent serves it; `page_tokens` is the engine's own block size where its scheme needs it. `kv_tokens` is
    how many tokens its KV cache holds, `None` where it doesn't say.
    """

    engine: str
    host: str
    url: str
    models: tuple[str, ...]
    identity: Identity
    shape: ModelShape
    chunk_tokens: int
    context_tokens: int
    key_scheme: str = "warmroute"
    page_tokens: int | None = None
    renderer: str = "reference"
    tokenizer_files: Mapping[str, str] = field(default_factory=dict)
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.key_scheme not in SCHEMES:
            raise IdentityRefused(f"key_scheme must be one of {', '.join(SCHEMES)}, not {self.key_scheme!r}")
        if self.chunk_tokens < 1:
            raise IdentityRefused(f"chunk_tokens must be at least 1, not {self.chunk_tokens}")
        if self.page_tokens is not None and (self.page_tokens < 1 or self.chunk_tokens % self.page_tokens):
            raise IdentityRefused(
                f"page_tokens must divide chunk_tokens ({self.chunk_tokens}), not be {self.page_tokens}"
            )


@dataclass(frozen=True, slots=True)
class GatewayRegistration:
    """One gateway, which reports what it has booked on engines. `url` is its admin API; nobody needs to reach it.

    A life that names an `engine` at `engine_url` is for what the gateway assumes that engine, which has no agent, to
    hold; it reports nothing.
    """

    gateway: str
    url: str
    engine: str = ""
    engine_url: str = ""


Registration = HostRegistration | EngineRegistration | GatewayRegistration


@dataclass(frozen=True, slots=True)
class BookedWork:
    """One gateway's account of an engine, when it was reported.

    Of the prefills that are outstanding: `backlog_s` is the sum of their predicted seconds, `head_s` that of the first,
    which could start `head_age_s` seconds ago. The engine showed `free_age_s` seconds ago that it was done with one.
    `running` requests are open, whose prompts hold `active_tokens` of its KV cache; `queued_tokens` are still to be
    computed.
    `recent_s` are the seconds of work that it was given lately, done or not. Where no request is open, only that and
    `free_age_s` say something.
    """

    backlog_s: float = 0.0
    head_s: float = 0.0
    head_age_s: float = 0.0
    free_age_s: float = 0.0
    prefills: int = 0
    running: int = 0
    queued_tokens: int = 0
    active_tokens: int = 0
    recent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What an incarnation reports with each renewal: the account of its tiers, and the rates it has observed.

    `is_directory_full`: its placements are refused, because the directory's server has no memory left.

    `announced_chunks`, of an engine: how many chunks it says to hold in its `gpu` tier now.

    `peer_bytes_per_s`, of a host: how fast chunks came from other hosts' agents, by their `peer_address`. At most
    `PEERS_REPORTED_MAX` of them; a peer that isn't named wasn't measured lately.

    `booked`, of a gateway: its open requests and its recent ones, by engine. At most `ENGINES_BOOKED_MAX`.
    """

    rates: Rates | None = None
    tier_bytes_used: Mapping[Tier, int] = field(default_factory=dict)
    tier_bytes_limit: Mapping[Tier, int] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    is_directory_full: bool = False
    peer_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    announced_chunks: int = 0
    booked: Mapping[str, BookedWork] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Member:
    """One row of the fleet's table, as read. `remaining_s` counts from when the reader sent its poll."""

    incarnation: bytes
    registration: Registration
    load: Load
    remaining_s: float
    retired: bool = False

    @property
    def is_live(self) -> bool:
        """Whether its placements are believed. A dead one has more than a term left where the clock went back."""
        return not self.retired and 0 < self.remaining_s <= TERM_MAX_S


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a renewal found. Unknown, or lapsed for longer than a term: the writer must begin a new life."""

    known: bool
    lapsed_s: float = 0.0


ROLES: Mapping[str, type[Registration]] = {
    "host": HostRegistration,
    "engine": EngineRegistration,
    "gateway": GatewayRegistration,
}


class UnreadableMember(DirectoryError):
    """A row of the table that this version can't read; readers skip it, count it, and keep the others."""


def role_of(registration: Registration) -> str:
    """`host`, `engine` or `gateway`."""
    return next(role for role, kind in ROLES.items() if isinstance(registration, kind))


def name_of(registration: Registration) -> str:
    """What a host, an engine or a gateway is called."""
    match registration:
        case HostRegistration():
            return registration.host
        case EngineRegistration():
            return registration.engine
        case GatewayRegistration():
            return registration.gateway


def place_of(registration: Registration) -> str:
    """The URL where it is."""
    return registration.agent_url if isinstance(registration, HostRegistration) else registration.url


def encode_registration(registration: Registration) -> bytes:
    """JSON of a registration, with its role."""
    row = {"role": role_of(registration), **asdict(registration)}
    if isinstance(registration, GatewayRegistration) and not registration.engine:
        del row["engine"], row["engine_url"]
    return json.dumps(row, separators=(",", ":"), sort_keys=True).encode()


def decode_registration(data: bytes) -> Registration:
    """The registration in `data`; fields of a newer version are ignored. Raises `UnreadableMember`.

    Registrations are written once and read at every poll: the last `DECODED_MAX` are remembered by their bytes.
    """
    if not isinstance(data, bytes):
        raise UnreadableMember(f"a registration is bytes, not {data!r}")
    _require_short(data)
    return _decoded_registration(data)


@lru_cache(maxsize=DECODED_MAX)
def _decoded_registration(data: bytes) -> Registration:
    try:
        row: dict[str, Any] = json.loads(data)
        role = row.pop("role")
        if role == "host":
            _require_text(row, "host", "agent_url")
            _require_port(row["agent_url"])
            if row.get("peer_address") is not None:
                _text(row["peer_address"], "peer_address", PEER_ADDRESS_CHARS_MAX)
            return HostRegistration(**_known_fields(HostRegistration, row))
        if role == "gateway":
            _require_text({"engine": "", "engine_url": "", **row}, "gateway", "url", "engine", "engine_url")
            return GatewayRegistration(**_known_fields(GatewayRegistration, row))
        if role != "engine":
            raise UnreadableMember(f"unknown role {role!r}")
        return _decode_engine(row)
    except KeyError as error:
        raise UnreadableMember(f"a registration lacks the field {error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UnreadableMember(f"a registration can't be read: {error!r}") from error


def encode_load(load: Load) -> bytes:
    """JSON of a load report."""
    rates = load.rates and {
        "flops": load.rates.flops,
        "bytes_per_s": {int(tier): value for tier, value in load.rates.bytes_per_s.items()},
        "fixed_s": {int(tier): value for tier, value in load.rates.fixed_s.items()},
    }
    row: dict[str, Any] = {
        "rates": rates,
        "used": {int(tier): value for tier, value in load.tier_bytes_used.items()},
        "limit": {int(tier): value for tier, value in load.tier_bytes_limit.items()},
        "running": load.running,
        "waiting": load.waiting,
    }
    if load.is_directory_full:
        row["directory_full"] = True
    if load.peer_bytes_per_s:
        row["peers"] = dict(load.peer_bytes_per_s)
    if load.announced_chunks:
        row["announced"] = load.announced_chunks
    booked = {engine: _packed(work) for engine, work in load.booked.items() if not _is_idle(work)}
    idle = {engine: _packed_idle(work) for engine, work in load.booked.items() if _is_idle(work)}
    if booked:
        row["booked"] = booked
    if idle:
        row["idle"] = idle
    return json.dumps(row, separators=(",", ":")).encode()


def decode_load(data: bytes) -> Load:
    """The load report in `data`. Raises `UnreadableMember`."""
    if not data:
        return Load()
    _require_short(data)
    try:
        row = json.loads(data)
        rates = row.get("rates")
        return Load(
            rates=rates and _decode_rates(rates),
            tier_bytes_used=_tiers(row["used"]),
            tier_bytes_limit=_tiers(row["limit"]),
            running=_number(row["running"]),
            waiting=_number(row["waiting"]),
            is_directory_full=row.get("directory_full") is True,
            peer_bytes_per_s=_peers(row.get("peers", {})),
            announced_chunks=int(_number(row.get("announced", 0))),
            booked=_booked(row.get("booked", {}), row.get("idle", {})),
        )
    except KeyError as error:
        raise UnreadableMember(f"a load report lacks the field {error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UnreadableMember(f"a load report can't be read: {error!r}") from error


def _require_short(data: bytes) -> None:
    if len(data) > ROW_BYTES_MAX:
        raise UnreadableMember(f"a row is longer than {ROW_BYTES_MAX} bytes")


def _decode_engine(row: dict[str, Any]) -> EngineRegistration:
    _require_text(row, "engine", "host", "url")
    _require_port(row["url"])
    row["identity"] = Identity(**_known_fields(Identity, row["identity"]))
    row["shape"] = ModelShape(
        **{name: _number(value, NUMBER_MIN) for name, value in _known_fields(ModelShape, row["shape"]).items()}
    )
    if not isinstance(row["models"], list):
        raise TypeError("models must be a list of texts")
    row["models"] = tuple(_text(model, "a model") for model in row["models"])
    files = dict(row.get("tokenizer_files", {}))
    row["tokenizer_files"] = {_text(name, "a file's name"): _text(sha, name) for name, sha in files.items()}
    for name in ("chunk_tokens", "context_tokens"):
        row[name] = _whole(row[name], name)
    for name in ("page_tokens", "kv_tokens"):
        if row.get(name) is not None:
            row[name] = _whole(row[name], name)
    _text(row.get("renderer", ""), "renderer")
    return EngineRegistration(**_known_fields(EngineRegistration, row))


def _decode_rates(row: Mapping[str, Any]) -> Rates:
    return Rates(_number(row["flops"], NUMBER_MIN), _tiers(row["bytes_per_s"], NUMBER_MIN), _tiers(row["fixed_s"]))


def _require_text(row: Mapping[str, Any], *names: str) -> None:
    for name in names:
        _text(row[name], name)


def _require_port(url: str) -> None:
    """Raises `ValueError` for a port that there can't be: whoever connects to it would meet no `OSError`."""
    urlsplit(url).port  # noqa: B018


def _text(value: Any, name: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """`value`, if it can stand in a header, a log line and a URL: others may write anything into the table."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, not {value!r}")
    if len(value) > chars_max or not value.isprintable():
        raise ValueError(f"{name} must be at most {chars_max} printable characters")
    return value


def _whole(value: Any, name: str) -> int:
    """`value` as a positive whole number; 256.0 is one, as some languages write it."""
    number = _number(value, NUMBER_MIN)
    if number != int(number):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    return int(number)


def _number(value: Any, at_least: float = 0) -> Any:
    """`value`, if it is a number from `at_least` to `NUMBER_MAX`: routing divides by what others report."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"not a number: {value!r}")
    if not at_least <= value <= NUMBER_MAX:
        raise ValueError(f"out of range: {value:.3g}" if isinstance(value, float) else "out of range")
    return value


def _known_fields(kind: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name in kind.__dataclass_fields__}


def _tiers(row: Mapping[str, Any], at_least: float = 0) -> dict[Tier, Any]:
    return {Tier(int(bit)): _number(value, at_least) for bit, value in row.items()}


def _peers(row: Mapping[str, Any]) -> dict[str, float]:
    if len(row) > PEERS_REPORTED_MAX:
        raise ValueError(f"more than {PEERS_REPORTED_MAX} peers")
    return {
        _text(address, "a peer", PEER_ADDRESS_CHARS_MAX): _number(value, NUMBER_MIN) for address, value in row.items()
    }


def _packed(work: BookedWork) -> list[float]:
    """Seconds to the millisecond, then counts: the report is small, and read by every gateway at every poll."""
    seconds = (round(each, 3) for each in (work.backlog_s, work.head_s, work.head_age_s, work.free_age_s))
    counts = (work.prefills, work.running, work.queued_tokens, work.active_tokens)
    return [*seconds, *counts, round(work.recent_s, 3)]


def _is_idle(work: BookedWork) -> bool:
    seconds, counts = (work.backlog_s, work.head_s, work.head_age_s), (work.prefills, work.running)
    return not any((*seconds, *counts, work.queued_tokens, work.active_tokens))


def _packed_idle(work: BookedWork) -> list[float]:
    """Most engines of a large fleet have nothing of one gateway's open: what they were given lately is told shortly."""
    return [round(work.free_age_s, 3), round(work.recent_s, 3)]


def _booked(row: Mapping[str, Any], idle: Mapping[str, Any]) -> dict[str, BookedWork]:
    if len(row) + len(idle) > ENGINES_BOOKED_MAX:
        raise ValueError(f"more than {ENGINES_BOOKED_MAX} engines")
    for engine in chain(row, idle):
        _text(engine, "an engine")
    booked = {
        engine: BookedWork(free_age_s=free_age_s, recent_s=recent_s)
        for engine, (free_age_s, recent_s) in zip(idle, _numbers_of(idle.values(), IDLE_NUMBERS), strict=True)
    }
    for engine, numbers in zip(row, _numbers_of(row.values(), BOOKED_NUMBERS), strict=True):
        backlog_s, head_s, head_age_s, free_age_s, prefills, running, queued, active, recent_s = numbers
        is_too_much = head_s > 1.0 + backlog_s or backlog_s > 1.0 + prefills * BOOKED_SERVICE_S_MAX
        if is_too_much or head_age_s > BOOKED_AGE_S_MAX or not prefills <= running <= BOOKED_RUNNING_MAX:
            raise ValueError(f"more work than there can be on {engine}: {numbers!r}")
        counts = int(prefills), int(running), int(queued), int(active)
        booked[engine] = BookedWork(backlog_s, head_s, head_age_s, free_age_s, *counts, recent_s)
    if any(each.free_age_s > BOOKED_AGE_S_MAX for each in booked.values()):
        raise ValueError(f"an age above {BOOKED_AGE_S_MAX:g} seconds")
    return booked


def _numbers_of(rows: Iterable[Any], count: int) -> list[Any]:
    """The first so many numbers of each; what a newer version puts behind is ignored. They are checked together: there
    are thousands of them a second.
    """
    lists = [numbers[:count] for numbers in rows]
    flat = list(chain.from_iterable(lists))
    if len(flat) != count * len(lists) or not set(map(type, flat)) <= {int, float} or not math.isfinite(sum(flat)):
        raise TypeError(f"not lists of {count} numbers")
    if flat and (min(flat) < 0 or max(flat) > NUMBER_MAX):
        raise ValueError("numbers out of range")
    return lists
