"""What is booked on each engine by all gateways: this one's ledger joined with what the others report of theirs.

An engine has one queue, whoever filled it, so accounts are joined and waits aren't added: two gateways with a second of
work each on an engine see two seconds there, and one second later one. Pure, but for the clock that is passed in. The
others' accounts are as old as their reports and the last look at them, and until the next one comes their work is taken
to go on as predicted. How often that is costs what it may:

    interval = max(SHARE_INTERVAL_S, (accounts in the others' reports + engines in them) / ACCOUNTS_PER_S_MAX)

Eight gateways with 16 busy engines hear of each other 20 times a second, 16 with 64 four times: a report is 5 kB then,
and reading all of them 2% of a core. A decision takes 2 us for each engine's load (`python -m bench.shared_load`).
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from directory.members import BOOKED_AGE_S_MAX, ENGINES_BOOKED_MAX, TERM_S, BookedWork, Member
from gateway.ledger import IDLE, Account, Ledger

SHARE_INTERVAL_S = 0.05
"""How far apart a gateway's reports are at least, and its looks at the others'."""
ACCOUNTS_PER_S_MAX = 4000
"""Accounts of engines, in the others' reports and in the own one, that are read or told in a second; a larger fleet's
gateways hear of each other less often. An account is 5 us of work: 2% of a core, however many there are."""
OWN_LIVES_MAX = 1024
"""Incarnations of this gateway's own that are remembered: it draws one when its last one was lost."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What is booked on an engine. `wait_s` is the work before a new request would start, `prefills` how many requests
    haven't shown their first byte, `running` how many are open; `queued_tokens` and `active_tokens` as in `Account`.
    `recent_s` are the seconds that the engine was given lately, done or not (`Ledger.recent_s`).
    """

    wait_s: float = 0.0
    prefills: int = 0
    running: int = 0
    queued_tokens: int = 0
    active_tokens: int = 0
    recent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Others:
    """The others' accounts of an engine, joined. At `seen_at` all of their prefills were still outstanding."""

    account: Account
    seen_at: float
    recent_s: float


class EngineLoads:
    """The load of every engine, by all gateways' accounts; `clock` is the ledger's."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger, self._clock = ledger, clock
        self._others: dict[str, _Others] = {}
        self._taken_at = float("-inf")
        self._own_lives: dict[bytes, None] = {}
        self.gateways: tuple[Member, ...] = ()
        """The other gateways that were live when they were last read."""
        self._accounts = 0

    @property
    def interval_s(self) -> float:
        """How far apart reports, and looks at the others', are to be (see the module)."""
        return max(SHARE_INTERVAL_S, (self._accounts + len(self._others)) / ACCOUNTS_PER_S_MAX)

    def of(self, engine: str) -> EngineLoad:
        """The load of an engine now."""
        others, now = self._others.get(engine), self._clock()
        if others is None or now >= self._taken_at + TERM_S:
            return self.of_own(engine)
        own, theirs = self._ledger.account(engine), others.account
        return EngineLoad(
            _joint_wait_s(own, others, now),
            own.prefills + theirs.prefills,
            own.running + theirs.running,
            own.queued_tokens + theirs.queued_tokens,
            own.active_tokens + theirs.active_tokens,
            self._ledger.recent_s(engine) + others.recent_s,
        )

    def of_own(self, engine: str) -> EngineLoad:
        """What this gateway alone has booked."""
        own, recent_s = self._ledger.account(engine), self._ledger.recent_s(engine)
        wait_s = own.wait_s(self._clock())
        return EngineLoad(wait_s, own.prefills, own.running, own.queued_tokens, own.active_tokens, recent_s)

    def of_others(self, engine: str) -> EngineLoad:
        """What the other gateways alone have booked."""
        others, now = self._others.get(engine), self._clock()
        if others is None or now >= self._taken_at + TERM_S:
            return EngineLoad()
        theirs = others.account
        wait_s = _joint_wait_s(IDLE, others, now)
        return EngineLoad(
            wait_s, theirs.prefills, theirs.running, theirs.queued_tokens, theirs.active_tokens, others.recent_s
        )

    def ahead_s(self, engine: str) -> float:
        """Seconds of the others' work before a new request on this engine would start."""
        return max(0.0, self.of(engine).wait_s - self._ledger.wait_s(engine))

    def disregard(self, incarnation: bytes) -> None:
        """Rows of this incarnation are this gateway's own: they aren't counted twice."""
        self._own_lives[incarnation] = None
        if len(self._own_lives) > OWN_LIVES_MAX:
            del self._own_lives[next(iter(self._own_lives))]

    def take(self, gateways: Sequence[Member]) -> None:
        """The gateways' rows, as just read. Lapsed ones and this gateway's own count for nothing."""
        now = self._clock()
        self.gateways = tuple(row for row in gateways if row.is_live and row.incarnation not in self._own_lives)
        reports: dict[str, list[tuple[float, BookedWork]]] = {}
        for row in self.gateways:
            reported_at = now - max(0.0, TERM_S - row.remaining_s)  # each report begins a new term
            for engine, work in row.load.booked.items():
                reports.setdefault(engine, []).append((reported_at, work))
        self._accounts = sum(map(len, reports.values()))
        self._others = {engine: _joined(each) for engine, each in reports.items()}
        self._taken_at = now


def published(ledger: Ledger, now: float) -> Mapping[str, BookedWork]:
    """What a gateway reports of its ledger: the `ENGINES_BOOKED_MAX` engines with most work, if there are more."""
    engines = dict.fromkeys((*ledger.engines(), *ledger.recent_engines()))
    accounts = {engine: ledger.account(engine) for engine in engines}
    if len(accounts) > ENGINES_BOOKED_MAX:
        most = heapq.nlargest(ENGINES_BOOKED_MAX, accounts, key=lambda engine: accounts[engine].backlog_s)
        accounts = {engine: accounts[engine] for engine in most}
    return {engine: _report(account, ledger.recent_s(engine), now) for engine, account in accounts.items()}


def _report(account: Account, recent_s: float, now: float) -> BookedWork:
    return BookedWork(
        backlog_s=max(0.0, account.backlog_s),
        head_s=account.head_s,
        head_age_s=min(BOOKED_AGE_S_MAX, max(0.0, now - account.head_at)) if account.prefills else 0.0,
        free_age_s=min(BOOKED_AGE_S_MAX, max(0.0, now - account.free_at)),
        prefills=account.prefills,
        running=account.running,
        queued_tokens=account.queued_tokens,
        active_tokens=account.active_tokens,
        recent_s=recent_s,
    )


def _joined(reports: Sequence[tuple[float, BookedWork]]) -> _Others:
    """Several gateways' reports of one engine as one account.

    Who of several was first in the queue can't be told from clocks, so the longest of the first ones stands for the one
    in service, since the earliest of them could start. One pass, as there are thousands of reports a second.
    """
    backlog_s = head_s = recent_s = 0.0
    head_at = seen_at = float("inf")
    free_at = float("-inf")
    prefills = running = queued_tokens = active_tokens = 0
    for reported_at, work in reports:
        free_at = max(free_at, reported_at - work.free_age_s)
        recent_s += work.recent_s
        if not work.running:
            continue
        running += work.running
        active_tokens += work.active_tokens
        if work.prefills:
            backlog_s += work.backlog_s
            prefills += work.prefills
            queued_tokens += work.queued_tokens
            head_s = max(head_s, work.head_s)
            head_at = min(head_at, reported_at - work.head_age_s)
            seen_at = min(seen_at, reported_at)
    if not prefills:
        head_at = seen_at = float("-inf")
    account = Account(backlog_s, head_s, head_at, free_at, prefills, running, queued_tokens, active_tokens)
    return _Others(account, seen_at, recent_s)


def _joint_wait_s(own: Account, others: _Others, now: float) -> float:
    """The wait by both accounts: that of one queue which holds all of their prefills (see `gateway.ledger`).

    It is worked off since the engine last showed that it was done with one, whoever saw it. Whose turn it is isn't
    known, so time that passes is taken for the others' work or the own head's, in any order; only when all of that must
    be done and the own head still isn't, it is overdue. Where nothing own is outstanding, what was left of the others'
    work when it was reported is done as time passes.
    """
    theirs = others.account
    if not theirs.prefills:
        return own.wait_s(now, theirs.free_at)
    free_at = max(own.free_at, theirs.free_at)
    if own.prefills:
        elapsed_s = max(0.0, now - max(free_at, min(own.head_at, theirs.head_at)))
        return max(0.0, own.backlog_s - own.head_s) + abs(theirs.backlog_s + own.head_s - elapsed_s)
    left_s = theirs.wait_s(others.seen_at, free_at)
    return max(0.0, left_s - max(0.0, now - max(others.seen_at, free_at)))
