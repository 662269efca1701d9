"""What routing must not get wrong, in simulated worlds: crowds, bursts, skew, newcomers, several gateways."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from directory.memory import MemoryDirectory
from directory.placements import PrefixMatch
from directory.tiers import Tier
from gateway.routing.policies import POLICIES
from gateway.routing.query import Candidate, RoutingDecision, RoutingQuery
from gateway.routing.router import route_by_affinity
from tests.warmroute.worlds import EXACT, fleet, prompt, send, send_in_turn, serve, shares, ttfts
from warmroute.replay.announcer import Announcer
from warmroute.replay.hardware import MODELS, Imperfection
from warmroute.replay.node_tiers import TierChanges
from warmroute.replay.report import report
from warmroute.replay.trace import TracedRequest, block_key
from warmroute.replay.world import Outcome, World

PREFIX = range(32)
UNHEARD = Imperfection(poll_interval_s=1e6)


class BoundedWorld(World):
    """Fails where so much is to happen that it would never end."""

    events = 0

    def at(self, moment: float, act: Callable[[], None]) -> None:
        self.events += 1
        assert self.events < 20_000
        super().at(moment, act)


def hit_rate(outcome: Outcome) -> float:
    return report("", outcome, 2.0).hit_rate["all"]


def turns(session: int, start_s: float, count: int, pause_s: float) -> Iterator[TracedRequest]:
    """A conversation: every turn has all before it, and a block more."""
    for turn in range(count):
        ids = range(1000 * (session + 1), 1000 * (session + 1) + 6 + turn)
        yield prompt(start_s + pause_s * turn, ids, 0, session, 60)


def conversations(of: Iterator[TracedRequest]) -> list[TracedRequest]:
    return sorted(of, key=lambda request: request.arrival_s)


def test_a_crowd_with_one_prefix_spreads_over_idle_engines_within_seconds() -> None:
    nodes, per_s, crowd_s = 8, 60, 5
    crowd = [prompt(30 + number / per_s, PREFIX, 1, 1 + number, 100) for number in range(per_s * crowd_s)]
    outcome = serve(fleet(nodes), [prompt(0, PREFIX, 1, 0), *crowd])
    assert shares(outcome, lambda number: number > 2 * per_s)[0] < 2 / nodes
    assert fmean(ttfts(outcome)[1:]) < 0.5, "a lone one takes 1.1 s to compute"
    assert hit_rate(outcome) > 0.8


def test_paced_prompts_of_which_none_is_in_flight_do_not_pile_up() -> None:
    alone = World(fleet(4, imperfection=EXACT), "seconds")
    send_in_turn(alone, [prompt(0, (), 4, number, 1) for number in range(200)], at_once=1)
    assert shares(alone.run())[0] < 0.35
    with_one_system_prompt = World(fleet(4, imperfection=EXACT), "seconds")
    send_in_turn(with_one_system_prompt, [prompt(0, [1], 4, number, 1) for number in range(200)], at_once=1)
    assert shares(with_one_system_prompt.run())[0] < 0.4


def test_single_turns_load_all_engines_alike() -> None:
    drawn = random.Random(1)
    requests = [prompt(number / 10, (), drawn.randrange(2, 10), number) for number in range(400)]
    busy_s = serve(fleet(5, imperfection=EXACT), requests).busy_s
    assert pstdev(busy_s) / fmean(busy_s) < 0.1


def test_a_request_from_each_of_16_gateways_spreads() -> None:
    at_once = [prompt(0, (), 8, number) for number in range(16)]
    outcome = serve(fleet(16, gateways=16), at_once)
    assert shares(outcome)[0] <= 4 / 16
    assert len(set(outcome.engines)) >= 8


@pytest.mark.parametrize("gateways", [1, 4])
def test_siblings_in_a_burst_share_engines_and_unrelated_prompts_have_their_own(gateways: int) -> None:
    siblings = [prompt(number / 100, range(16), 1, number) for number in range(8)]
    together = serve(fleet(8, gateways=gateways), siblings)
    strangers = [prompt(number / 100, (), 17, number) for number in range(8)]
    apart = serve(fleet(8, gateways=gateways), strangers)
    assert len(set(together.engines)) < len(set(apart.engines))
    assert hit_rate(together) > 0.3, "three of eight at least find what one computed"


def test_siblings_beyond_what_one_engine_can_bear_go_elsewhere() -> None:
    siblings = [prompt(number / 100, range(16), 1, number) for number in range(64)]
    outcome = serve(fleet(8), siblings)
    assert shares(outcome)[0] < 0.5
    assert hit_rate(outcome) > 0.7
    assert max(ttfts(outcome)) < 1.0


def test_a_new_engine_has_its_fair_share_within_20_seconds() -> None:
    drawn = random.Random(3)
    sessions = [turns(number, drawn.uniform(0, 100), 4, 8.0) for number in range(120)]
    requests = conversations(each for session in sessions for each in session)
    world = World(fleet(4), "seconds", absent=frozenset({3}))
    world.at(50.0, lambda: world.join(3))
    send(world, requests)
    outcome = world.run()

    def share(begin_s: float, end_s: float) -> float:
        engines = [
            engine
            for engine, request in zip(outcome.engines, requests, strict=True)
            if begin_s <= request.arrival_s < end_s
        ]
        return engines.count(3) / len(engines)

    assert share(0, 50) == 0
    assert share(50, 70) > 0.15
    assert 0.15 < share(70, 100) < 0.45


def test_under_skew_nothing_swings() -> None:
    drawn, requests, at = random.Random(2), [], 0.0
    while at < 40:
        at += drawn.expovariate(30)
        family = min(int(drawn.paretovariate(0.7)) - 1, 40)
        requests.append(prompt(at, range(1000 * family, 1000 * family + 12), 1, len(requests), 40))
    outcome = serve(fleet(8), requests)
    waits = defaultdict(list)
    for request, ttft_s in zip(requests, ttfts(outcome), strict=True):
        waits[int(request.arrival_s // 10)].append(ttft_s)
    later = [fmean(waits[tenth]) for tenth in (1, 2, 3)]
    assert max(later) < 1.5 * min(later)
    assert max(later) < 0.2
    moves = sum(before != after for before, after in pairwise(_homes_of_the_hottest(outcome, requests)))
    assert moves <= 2


def _homes_of_the_hottest(outcome: Outcome, requests: Sequence[TracedRequest]) -> list[frozenset[int]]:
    """Which engines served the hottest prefix more than now and then, in each period of ten seconds."""
    served: list[list[int]] = [[], [], [], []]
    for engine, request in zip(outcome.engines, requests, strict=True):
        if request.keys[0] == block_key(0):
            served[min(3, int(request.arrival_s // 10))].append(engine)
    return [frozenset(each for each in engines if engines.count(each) > len(engines) / 10) for engines in served]


def test_a_holder_that_is_replying_keeps_its_prefix() -> None:
    requests = [
        prompt(0, PREFIX, 1, 0),
        prompt(10, (), 1, 1, 300),
        prompt(10.5, PREFIX, 1, 2),
        prompt(11, PREFIX, 1, 3),
    ]
    holder, _, *followers = serve(fleet(4), requests).engines
    assert followers == [holder, holder]


def test_a_prompt_leaves_an_owner_that_is_overloaded() -> None:
    owner = [prompt(0, range(8), 1, 0)]
    overload = [prompt(20, range(8), 60, 10), prompt(20.5, range(8), 1, 100)]
    first, busy, last = serve(fleet(4), owner + overload).engines
    assert first == busy, "most of it isn't there, but some is"
    assert last != first


@pytest.mark.parametrize("gateways", [1, 2])
def test_the_turns_of_a_conversation_stay_together(gateways: int) -> None:
    drawn = random.Random(4)
    sessions = [turns(number, drawn.uniform(0, 8), 5, 10.0) for number in range(40)]
    requests = conversations(each for session in sessions for each in session)
    outcome = serve(fleet(4, gateways=gateways, imperfection=EXACT), requests)
    homes = defaultdict(set)
    for engine, request in zip(outcome.engines, requests, strict=True):
        homes[request.keys[0]].add(engine)
    assert sum(len(engines) > 1 for engines in homes.values()) <= 2
    assert shares(outcome)[0] < 0.4


def test_800_clients_at_once_wait_less_than_by_least_load() -> None:
    drawn = random.Random(5)
    families = [range(100 * number, 100 * number + 8) for number in range(30)]
    requests = [prompt(0, drawn.choice(families), drawn.randrange(4), number) for number in range(1000)]
    outcomes = {}
    for policy in ("seconds", "least-load"):
        world = World(fleet(4), policy)
        send_in_turn(world, requests, at_once=800)
        outcomes[policy] = world.run()
    assert fmean(ttfts(outcomes["seconds"])) < fmean(ttfts(outcomes["least-load"]))


def test_gateways_that_hear_nothing_of_each_other_route_by_their_own_account() -> None:
    at_once = [prompt(number / 100, (), 8, number) for number in range(32)]
    outcome = serve(fleet(4, gateways=2, imperfection=UNHEARD), at_once)
    assert shares(outcome)[0] < 0.5
    assert len(outcome.jobs) == 32


@pytest.mark.parametrize("gateways", [2, 3, 7])
@pytest.mark.parametrize(("report_s", "poll_s"), [(0.1, 0.2), (0.1, 0.1), (0.3, 0.1), (0.05, 0.07)], ids=str)
def test_reports_and_polls_end_whatever_their_intervals_round_to(gateways: int, report_s: float, poll_s: float) -> None:
    requests = [prompt(number * poll_s / 3, (), 1, number, 1) for number in range(60)]
    known = Imperfection(report_interval_s=report_s, poll_interval_s=poll_s, report_s=0.0)
    world = BoundedWorld(fleet(3, gateways=gateways, imperfection=known), "seconds")
    send(world, requests)
    assert len(world.run().jobs) == 60


@pytest.mark.parametrize(("known", "is_avoided"), [(EXACT, True), (UNHEARD, False)], ids=["reports", "no reports"])
def test_a_gateway_avoids_the_engine_that_another_has_filled(known: Imperfection, is_avoided: bool) -> None:
    # The first gateway has a prompt of many seconds on one engine; the second's prompts, every other one, are short.
    short = [prompt(2 + number / 4, (), 2, number) for number in range(1, 20)]
    outcome = serve(fleet(2, gateways=2, imperfection=known), [prompt(0, (), 190, 0, 1), *short])
    filled = outcome.engines[0]
    assert outcome.jobs[0].first_token_at > 8
    assert (filled not in outcome.engines[1::2]) == is_avoided


def test_the_hit_rate_stays_with_up_to_8_gateways() -> None:
    drawn = random.Random(6)
    sessions = [turns(number, drawn.uniform(0, 60), 5, 8.0) for number in range(60)]
    requests = conversations(each for session in sessions for each in session)
    rates = [hit_rate(serve(fleet(4, gateways=gateways), requests)) for gateways in (1, 2, 4, 8)]
    assert max(rates) - min(rates) < 0.02


def test_of_64_nodes_that_hold_a_block_in_three_tiers_all_are_seen() -> None:
    names = [f"engine-{number}" for number in range(64)]
    announcer = Announcer(MemoryDirectory(lambda: 0.0), names)
    key, host = block_key(0), int(Tier.DRAM | Tier.NVME)
    for number in range(64):
        announcer.announce(number, TierChanges({key: int(Tier.GPU)}, {key: host}), 0.0)
    assert announcer.matches([key]) == {name: PrefixMatch((Tier.GPU,)) for name in names}
    assert announcer.host_matches([key]) == {name: PrefixMatch((Tier.DRAM,)) for name in names}


def test_what_a_node_holds_is_still_known_after_a_fleet_was_silent_for_hours() -> None:
    now = 0.0
    announcer = Announcer(MemoryDirectory(lambda: now), ["a", "b", "c"])
    key = block_key(0)
    for number, now in enumerate((0.0, 0.0, 9000.0)):
        announcer.announce(number, TierChanges({key: int(Tier.GPU)}, {}), now)
    assert announcer.matches([key]) == {name: PrefixMatch((Tier.GPU,)) for name in ("a", "b", "c")}


@pytest.mark.parametrize(
    ("running", "stays"),
    [((0,), True), ((9,), True), ((1, 1), True), ((2, 1), True), ((3, 1), True), ((3, 0), False), ((2, 0, 0), False)],
)
def test_the_bound_holds_for_few_engines(running: tuple[int, ...], stays: bool) -> None:
    # At most ceil(1.25 x (open requests, this one counted) / engines) may be on the home.
    model = MODELS["8b"]
    idle = [Candidate(f"e{number}", model.shape, model.rates, 512) for number in range(len(running))]
    home = route_by_affinity(RoutingQuery(2600, b"key", tuple(idle)), "x").ranked[0].engine
    others = [each.engine for each in idle if each.engine != home]
    loads = dict(zip([home, *others], running, strict=True))
    loaded = tuple(Candidate(each.engine, model.shape, model.rates, 512, running=loads[each.engine]) for each in idle)
    assert (route_by_affinity(RoutingQuery(2600, b"key", loaded), "x").ranked[0].engine == home) == stays


def test_replies_that_run_on_an_engine_send_the_next_prompt_elsewhere() -> None:
    # Ten long replies are decoded on one engine, whose prefix brings them there; nothing is prefilled any more.
    long_replies = [prompt(10 + number, PREFIX, 0, number, 2000) for number in range(10)]
    outcome = serve(
        fleet(2, imperfection=EXACT),
        [prompt(0, PREFIX, 0, 99), *long_replies, *(prompt(25 + n, (), 8, 200 + n) for n in range(8))],
    )
    busy = outcome.engines[0]
    assert set(outcome.engines[1:11]) == {busy}
    assert outcome.engines[11:].count(busy) <= 2


@pytest.mark.parametrize(("policy", "position"), [("seconds", 0), ("sticky", 1)])
def test_the_default_is_asked_as_a_gateway_asks_and_others_are_told_sessions(
    policy: str, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RoutingQuery] = []

    class Listening(type(POLICIES[policy]())):  # type: ignore[misc]
        def route(self, query: RoutingQuery) -> RoutingDecision:
            asked.append(query)
            return super().route(query)  # type: ignore[no-any-return]

    monkeypatch.setitem(POLICIES, policy, Listening)
    serve(fleet(2), [prompt(0.0, range(4), 0, 0)], policy)
    assert [each.affinity for each in asked] == [asked[0].keys[position]]
