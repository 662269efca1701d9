"""What is booked on each engine by all gateways: this one's ledger joined with what the others report of theirs.

An engine has one queue, whoever filled it, so accounts are joined and waits aren't added: two gateways with a second of
work each on an engine see two seconds there, and one second later one. Pure, but for the clock that is passed in. The
others' accounts are as old as their reports and the last poll of the table, and until the next one comes their work is
taken to go on as predicted.

With 16 gateways and 64 busy engines a report is 5 kB, four a second; a poll's share of them costs 1% of a core, and a
decision 2 us for each engine's load (`python -m bench.shared_load`).
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from directory.members import BOOKED_AGE_S_MAX, ENGINES_BOOKED_MAX, TERM_S, BookedWork, Member
from gateway.ledger import IDLE, Account, Ledger

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
        """The other gateways of the last table that are live."""

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
        """The gateways' rows of the table, as just read. Lapsed ones and this gateway's own count for nothing."""
        now = self._clock()
        self.gateways = tuple(row for row in gateways if row.is_live and row.incarnation not in self._own_lives)
        reports: dict[str, list[tuple[float, BookedWork]]] = {}
        for row in self.gateways:
            reported_at = now - max(0.0, TERM_S - row.remaining_s)  # each report begins a new term
            for engine, work in row.load.booked.items():
                reports.setdefault(engine, []).append((reported_at, work))
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
        head_age_s=min(BOOKED_AGE_S_MAX, max(0.0, now - account.head_at)),
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
    in service, since the earliest of them could start.
    """
    waiting = [(reported_at, work) for reported_at, work in reports if work.prefills]
    account = Account(
        backlog_s=sum(work.backlog_s for _, work in reports),
        head_s=max((work.head_s for _, work in waiting), default=0.0),
        head_at=min((reported_at - work.head_age_s for reported_at, work in waiting), default=float("-inf")),
        free_at=max(reported_at - work.free_age_s for reported_at, work in reports),
        prefills=sum(work.prefills for _, work in reports),
        running=sum(work.running for _, work in reports),
        queued_tokens=sum(work.queued_tokens for _, work in reports),
        active_tokens=sum(work.active_tokens for _, work in reports),
    )
    seen_at = min((reported_at for reported_at, _ in waiting), default=float("-inf"))
    return _Others(account, seen_at, sum(work.recent_s for _, work in reports))


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
