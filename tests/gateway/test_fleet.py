"""The fleet's table: who is believed, who may serve, and what a silent directory or a dead agent changes."""

import logging
from dataclasses import dataclass, replace

import httpx
import pytest
from pydantic import SecretStr

from directory.costs import ModelShape, Rates
from directory.errors import DirectoryUnavailable
from directory.hardware import Hardware
from directory.members import TERM_S, EngineRegistration, HostRegistration, Load, Member, draw_incarnation
from directory.memory import MemoryDirectory
from directory.tiers import Tier
from gateway.config import EngineConfig, HardwareConfig, ModelConfig
from gateway.encoding.model_files import ModelFiles
from gateway.fleet import UNKNOWN_CONTEXT_TOKENS, UNKNOWN_SHAPE, Fleet
from gateway.health import FAILURES_MAX, HealthCheck
from tests.gateway.samples import ENGINE_LOAD, HOST_LOAD, MODEL, engine_registration, host_registration


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class FailingDirectory(MemoryDirectory):
    """Unreachable while `is_down`."""

    is_down = False

    async def members(self) -> tuple[Member, ...]:
        if self.is_down:
            raise DirectoryUnavailable("down on purpose")
        return await super().members()


class Answers:
    """What engines answer to health checks: a status by URL, 200 unless said otherwise."""

    def __init__(self) -> None:
        self.status: dict[str, int | None] = {}
        self.models = [MODEL]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        base = f"{request.url.scheme}://{request.url.host}:{request.url.port}"
        status = self.status.get(base, 200)
        if status is None:
            raise httpx.ConnectError("refused")
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": model} for model in self.models]})
        return httpx.Response(status)


@dataclass
class Setup:
    clock: Clock
    directory: FailingDirectory
    answers: Answers
    fleet: Fleet

    async def join(self, engine: str, url: str, host: str = "h") -> bytes:
        life = draw_incarnation()
        await self.directory.register(life, engine_registration(engine, url, host), ENGINE_LOAD)
        return life

    async def join_host(self, host: str = "h") -> bytes:
        life = draw_incarnation()
        await self.directory.register(life, host_registration(host), HOST_LOAD)
        return life

    async def see(self) -> None:
        await self.fleet.refresh()
        await self.fleet.check_health()


@pytest.fixture
def setup() -> Setup:
    clock, answers = Clock(), Answers()
    directory = FailingDirectory(clock)
    client = httpx.AsyncClient(transport=httpx.MockTransport(answers))
    return Setup(clock, directory, answers, Fleet(directory, HealthCheck(client), clock))


A, B = "http://a:1", "http://b:1"


async def test_an_engine_joins_when_it_is_well_and_lists_its_model(setup: Setup) -> None:
    setup.answers.status[A] = 503
    await setup.join("a", A)
    await setup.see()
    assert setup.fleet.table.serving(MODEL) == ()
    setup.answers.status[A], setup.answers.models = 200, ["still loading"]
    await setup.see()
    assert "doesn't list" in setup.fleet.table.engines["a"].state
    setup.answers.models = [MODEL]
    await setup.see()
    assert [view.engine for view in setup.fleet.table.serving(MODEL)] == ["a"]


@pytest.mark.parametrize(
    ("config", "known"),
    [
        ({"tokenizer": "org/name", "kv_tokens": 9000}, 9000),
        ({"tokenizer": "org/name"}, None),
        ({"kv_tokens": 9000}, None),
    ],
    ids=str,
)
async def test_what_an_engine_without_an_agent_holds_is_known_where_it_is_configured_with_its_tokenizer(
    config: dict[str, object], known: int | None
) -> None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(Answers())) as control:
        static = EngineConfig(url=A, name="a", **config)  # type: ignore[arg-type]
        fleet = Fleet(MemoryDirectory(Clock()), HealthCheck(control), Clock(), static=[static])
        assert fleet.table.engines["a"].kv_tokens == known


async def test_an_engine_is_joined_with_its_hosts_lives(setup: Setup) -> None:
    host, engine = await setup.join_host(), await setup.join("a", A)
    await setup.see()
    view = setup.fleet.table.engines["a"]
    assert (view.reach.own, view.reach.host) == ({engine}, {host})
    assert view.rates is not None
    assert view.rates.flops == 1e11
    assert view.rates.bytes_per_s == {Tier.DRAM: 2e9}


async def test_two_engines_of_one_host_share_its_tiers(setup: Setup) -> None:
    host = await setup.join_host()
    await setup.join("a", A)
    await setup.join("b", B)
    await setup.see()
    assert all(view.reach.host == {host} for view in setup.fleet.table.engines.values())


async def test_whose_placements_a_full_directory_refuses_is_shown_and_said_once(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    life = await setup.join_host()
    await setup.join("a", A)
    for is_full in (False, True, True, False):
        await setup.directory.renew(life, replace(HOST_LOAD, is_directory_full=is_full))
        await setup.see()
        assert setup.fleet.directory_full_for == (("h",) if is_full else ())
    assert [each.getMessage() for each in caplog.records if "full" in each.getMessage()] == [
        "the directory is full: placements of h, and maybe of others, aren't taken"
    ]
    await setup.directory.renew(life, replace(HOST_LOAD, is_directory_full=True))
    setup.clock.now += TERM_S + 1
    await setup.see()
    assert setup.fleet.directory_full_for == (), "nobody knows what one who is silent would be told"


async def test_a_dead_engine_whose_servers_clock_went_back_does_not_keep_its_name(setup: Setup) -> None:
    dead = draw_incarnation()
    await setup.directory.register(dead, engine_registration("a", A), ENGINE_LOAD)
    await setup.see()
    await setup.directory.renew(dead, ENGINE_LOAD, 3600.0)  # as if an hour came again
    await setup.join("a", B)
    await setup.see()
    assert setup.fleet.table.engines["a"].url == B


async def test_both_lives_are_believed_during_a_walk(setup: Setup) -> None:
    first, second = await setup.join_host(), await setup.join_host()
    await setup.join("a", A)
    await setup.see()
    assert setup.fleet.table.engines["a"].reach.host == {first, second}
    await setup.directory.retire(first)
    await setup.see()
    assert setup.fleet.table.engines["a"].reach.host == {second}


async def test_a_dead_agent_costs_belief_and_not_the_engine(setup: Setup) -> None:
    await setup.join_host()
    await setup.join("a", A)
    keeper = [await setup.join_host("other"), await setup.join("b", B, "other")]
    keeper.append(await setup.join_host("third"))
    await setup.see()
    for _ in range(12):  # the other hosts renew, host h doesn't
        setup.clock.now += 1
        for life in keeper:
            await setup.directory.renew(life, Load())
        await setup.see()
    view = setup.fleet.table.engines["a"]
    assert view.is_ready
    assert not view.reach.own | view.reach.host
    assert setup.fleet.table.engines["b"].reach.host


async def test_when_more_than_half_lapses_at_once_it_is_believed_for_one_more_term(setup: Setup) -> None:
    host = await setup.join_host()
    await setup.join("a", A)
    await setup.see()
    setup.clock.now += TERM_S + 0.1
    await setup.see()
    assert setup.fleet.directory_state == "many lapsed"
    assert setup.fleet.table.engines["a"].reach.host == {host}
    setup.clock.now += TERM_S + 0.1
    await setup.see()
    assert setup.fleet.table.engines["a"].reach.host == frozenset()


async def test_an_unreadable_table_is_believed_for_one_term_and_then_not(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await setup.join_host()
    await setup.join("a", A)
    await setup.see()
    setup.directory.is_down = True
    await setup.see()
    assert "unavailable" in setup.fleet.directory_state
    assert setup.fleet.is_directory_known()
    setup.clock.now += TERM_S + 0.1
    await setup.see()
    assert not setup.fleet.is_directory_known()
    assert setup.fleet.table.serving(MODEL)
    setup.directory.is_down = False
    for _ in range(2):
        await setup.see()
    assert setup.fleet.is_directory_known()
    assert [record.message for record in caplog.records].count("the directory's table can be read again") == 1


async def test_a_life_that_ends_between_polls_is_no_longer_believed(setup: Setup) -> None:
    host = await setup.join_host()
    await setup.join("a", A)
    keeper = [await setup.join_host("other"), await setup.join("b", B, "other"), await setup.join_host("third")]
    setup.clock.now += TERM_S - 0.2
    for life in keeper:
        await setup.directory.renew(life, Load())
    await setup.see()
    assert setup.fleet.table.engines["a"].reach.host == {host}
    setup.clock.now += 0.3  # the next poll is late
    assert setup.fleet.directory_state == "ok"
    view = setup.fleet.table.engines["a"]
    assert not view.reach.own | view.reach.host
    assert view.is_ready
    assert setup.fleet.table.engines["b"].reach.host


async def test_each_failed_poll_is_told(setup: Setup) -> None:
    unread: list[int] = []
    client = httpx.AsyncClient(transport=httpx.MockTransport(setup.answers))
    fleet = Fleet(setup.directory, HealthCheck(client), setup.clock, on_unread=lambda: unread.append(1))
    await fleet.refresh()
    assert not unread
    setup.directory.is_down = True
    for _ in range(3):
        await fleet.refresh()
    assert len(unread) == 3


async def test_a_restarted_gateway_believes_all_with_its_first_table(setup: Setup) -> None:
    await setup.join_host()
    await setup.join("a", A)
    await setup.see()
    client = httpx.AsyncClient(transport=httpx.MockTransport(setup.answers))
    restarted = Fleet(setup.directory, HealthCheck(client), setup.clock)
    assert not restarted.is_directory_known()
    await restarted.refresh()
    assert restarted.is_directory_known()
    assert restarted.table.engines["a"].reach == setup.fleet.table.engines["a"].reach


async def test_one_slow_check_is_forgiven_and_two_are_not(setup: Setup) -> None:
    await setup.join("a", A)
    await setup.see()
    setup.answers.status[A] = None
    for _ in range(FAILURES_MAX - 1):
        await setup.see()
        assert setup.fleet.table.engines["a"].is_ready
    await setup.see()
    assert not setup.fleet.table.engines["a"].is_ready
    setup.answers.status[A] = 200
    await setup.see()
    assert setup.fleet.table.engines["a"].is_ready


async def test_after_a_dropped_connection_one_failed_check_is_enough(setup: Setup) -> None:
    await setup.join("a", A)
    await setup.see()
    setup.fleet.note_failure("a")
    assert not setup.fleet.table.engines["a"].is_ready
    setup.answers.status[A] = None
    await setup.see()
    assert not setup.fleet.table.engines["a"].is_ready


async def test_an_engine_that_moved_must_prove_itself_anew(setup: Setup) -> None:
    old = await setup.join("a", A)
    await setup.see()
    await setup.directory.retire(old)
    setup.answers.status[B] = None
    await setup.join("a", B)
    await setup.see()
    assert setup.fleet.table.engines["a"].url == B
    assert not setup.fleet.table.engines["a"].is_ready


async def test_a_retired_and_dead_engine_leaves_the_table_when_its_row_is_forgotten(setup: Setup) -> None:
    life = await setup.join("a", A)
    await setup.see()
    await setup.directory.retire(life)
    setup.answers.status[A] = None
    await setup.see()
    await setup.see()
    assert not setup.fleet.table.engines["a"].is_ready
    setup.clock.now += 601
    await setup.see()
    assert setup.fleet.table.engines == {}


async def test_of_two_live_engines_with_one_name_the_first_is_kept_and_the_other_is_said(setup: Setup) -> None:
    taken: list[int] = []
    client = httpx.AsyncClient(transport=httpx.MockTransport(setup.answers))
    fleet = Fleet(setup.directory, HealthCheck(client), setup.clock, on_name_taken=lambda: taken.append(1))
    await setup.join_host("h")
    first = await setup.join("a", A)
    await fleet.refresh()
    second = await setup.join("a", B)
    setup.clock.now += 1
    await setup.directory.renew(second, ENGINE_LOAD)
    for _ in range(3):
        await fleet.refresh()
        view = fleet.table.engines["a"]
        assert view.url == A
        assert view.reach.own == {first}
    assert len(taken) == 1
    await setup.directory.retire(first)
    await fleet.refresh()
    assert fleet.table.engines["a"].url == B
    assert fleet.table.engines["a"].reach.own == {second}


async def test_hosts_with_one_name_do_not_lend_each_other_their_tiers(setup: Setup) -> None:
    mine = await setup.join_host("h")
    await setup.join("a", A)
    await setup.see()
    other = draw_incarnation()
    await setup.directory.register(other, HostRegistration("h", "http://elsewhere:1"), HOST_LOAD)
    await setup.see()
    assert setup.fleet.table.engines["a"].reach.host == {mine}


async def test_one_broken_engine_does_not_hide_the_others(setup: Setup) -> None:
    await setup.join("a", A)
    await setup.join("b", B)
    setup.answers.status[A] = None
    await setup.see()
    assert [view.engine for view in setup.fleet.table.serving(MODEL)] == ["b"]


async def test_an_engine_with_other_chunks_is_kept_apart_by_its_registration(setup: Setup) -> None:
    await setup.join("a", A)
    life = draw_incarnation()
    await setup.directory.register(life, engine_registration("b", B, chunk_tokens=512), ENGINE_LOAD)
    await setup.see()
    sizes = {view.engine: view.chunk_tokens for view in setup.fleet.table.engines.values()}
    assert sizes == {"a": 4, "b": 512}
    assert all(isinstance(view.registration, EngineRegistration) for view in setup.fleet.table.engines.values())


async def test_an_engine_without_an_agent_is_asked_for_its_models(setup: Setup) -> None:
    static = [EngineConfig(url=A), EngineConfig(url=B, name="mine", models=("other",))]
    client = httpx.AsyncClient(transport=httpx.MockTransport(setup.answers))
    fleet = Fleet(setup.directory, HealthCheck(client), setup.clock, static=static)
    setup.answers.models = ["one", "two"]
    await fleet.refresh()
    await fleet.check_health()
    assert [view.engine for view in fleet.table.serving("two")] == ["a:1"]
    assert "doesn't list its model other" in fleet.table.engines["mine"].state
    setup.answers.models = ["other"]
    await fleet.check_health()
    assert [view.engine for view in fleet.table.serving("other")] == ["mine"]
    assert fleet.models_seen == {"one", "two", "other"}
    await fleet.refresh()
    assert fleet.table.engines["a:1"].is_ready


async def test_an_engine_without_a_health_path_is_well_while_it_lists_its_models(setup: Setup) -> None:
    client = httpx.AsyncClient(transport=httpx.MockTransport(setup.answers))
    fleet = Fleet(setup.directory, HealthCheck(client), setup.clock, static=[EngineConfig(url=A)])
    setup.answers.status[A] = 404
    await fleet.check_health()
    assert fleet.table.engines["a:1"].is_ready
    setup.answers.models = []
    for _ in range(FAILURES_MAX):
        await fleet.check_health()
    assert not fleet.table.engines["a:1"].is_ready


async def test_the_engines_own_key_is_used_for_its_checks(setup: Setup) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return setup.answers(request)

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    static = [EngineConfig(url=A, api_key=SecretStr("k"))]
    fleet = Fleet(setup.directory, HealthCheck(client), setup.clock, static=static)
    await fleet.check_health()
    assert set(seen) == {"Bearer k"}


@pytest.mark.parametrize(
    ("listed", "context"),
    [(8192, 8192), (None, UNKNOWN_CONTEXT_TOKENS), (-1, UNKNOWN_CONTEXT_TOKENS), ("8k", UNKNOWN_CONTEXT_TOKENS)],
)
async def test_an_engine_without_an_agent_says_how_long_its_prompts_may_be(
    setup: Setup, listed: object, context: int
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": [{"id": MODEL, "max_model_len": listed}]})

    files = ModelFiles("vllm", (("tokenizer.json", "a" * 64),))
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        fleet = Fleet(
            setup.directory,
            HealthCheck(client),
            setup.clock,
            static=[EngineConfig(url=A)],
            files_of=lambda engine: files,
        )
        await fleet.check_health()
    (view,) = fleet.table.serving(MODEL)
    assert (view.context_tokens, view.files) == (context, files)


async def test_an_engine_without_agent_starts_as_its_model_and_accelerators_are_known(setup: Setup) -> None:
    house = ModelConfig(name="house-1b", parameters=1e9, layers=16, d_model=2048, kv_heads=8, head_dim=64)
    hardware = HardwareConfig(models=(house,)).tables()
    static = [
        EngineConfig(url=A, shape="house-1b", accelerator="h100", devices=2),
        EngineConfig(url=B, models=("Llama-3.1-8B-Instruct",)),
    ]
    setup.answers.models = ["Llama-3.1-8B-Instruct", "gpt-unknown"]
    async with httpx.AsyncClient(transport=httpx.MockTransport(setup.answers)) as client:
        fleet = Fleet(setup.directory, HealthCheck(client), setup.clock, static=static, hardware=hardware)
        await fleet.check_health()
        configured, listed = (fleet.table.engines[each.engine] for each in static)
        assert configured.rates == Rates(2 * 0.4 * 989e12)
        assert configured.shape == ModelShape(1e9, 16, 2048, 32_768)
        assert (listed.rates, listed.shape) == (None, Hardware().model("llama-3.1-8b").shape())
        assert configured.shape != UNKNOWN_SHAPE != listed.shape
