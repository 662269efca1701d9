"""What the doctor makes of what it was told: rules without any part."""

import dataclasses

import pytest

from directory.members import GatewayRegistration, HostRegistration, Load, Member, draw_incarnation
from directory.server_report import ServerReport
from tests.gateway.samples import IDENTITY, engine_registration
from warmroute.doctor.agents import check_place, check_status, is_loopback
from warmroute.doctor.cache_use import Answered, judge
from warmroute.doctor.clocks import Reading, check_clocks
from warmroute.doctor.difference import difference
from warmroute.doctor.engine_settings import check_cache_config, check_server_info
from warmroute.doctor.finding import Finding, Verdict, exit_status, failed, note, right, unknown, wrong
from warmroute.doctor.gateways import check_degraded, check_fleet
from warmroute.doctor.identities import check_engines, check_table, check_versions
from warmroute.doctor.page import as_page
from warmroute.doctor.servers import check_server

TEXTS = {1: "<s>", 2: "a", 3: "b", 4: "ab", 5: "2026-01-01", 6: "2026-01-02"}


def decode(ids: object) -> str:
    return "".join(TEXTS[each] for each in ids)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ours", "theirs", "has_template", "cause"),
    [
        ((1, 2), (1, 1, 2), True, "the engine puts the beginning token '<s>' in front twice"),
        ((2, 3), (1, 2, 3), False, "the engine puts '<s>' in front, which the gateway doesn't"),
        ((1, 2), (2,), True, "the engine leaves out the beginning token '<s>'"),
        ((1, 2, 3), (1, 4), True, "one text, and two tokenizers"),
        ((2, 5), (2, 6), True, "the template tells the date or the time"),
        ((1, 2, 2), (1, 2, 3), True, "another chat template, or other arguments for it"),
        ((1, 2, 2), (1, 2, 3), False, "two tokenizers"),
        ((1, 2), (1, 2, 3), True, "another chat template, or other arguments for it"),
    ],
)
def test_a_difference_has_its_likely_reason(
    ours: tuple[int, ...], theirs: tuple[int, ...], has_template: bool, cause: str
) -> None:
    found = difference(ours, theirs, decode, has_template)
    assert found.cause == cause
    assert found.mend


def test_the_first_differing_token_is_shown() -> None:
    found = difference((1, 2, 3, 3), (1, 2, 4, 3), decode, True)
    assert found.shows == "first at token 2: the engine has 4 in '<s>aabb', the gateway 3 in '<s>abb'"
    assert "nothing more after 2 tokens" in difference((1, 2), (1, 2, 3), decode, True).shows


COLD = Answered("x", 300, 0)


@pytest.mark.parametrize(
    ("warm", "salted", "verdicts"),
    [
        pytest.param(Answered("x", 300, 256), COLD, "right right", id="well"),
        pytest.param(Answered("x", 300, 256), None, "right right", id="no salts"),
        pytest.param(Answered("x", 300, 0), COLD, "WRONG right", id="no hit"),
        pytest.param(Answered("x", 300, None), COLD, "note right", id="unsaid"),
        pytest.param(Answered("y", 300, 256), COLD, "right WRONG", id="other output"),
        pytest.param(Answered("y", 300, 256), Answered("z", 300, 0), "right not checked", id="never the same"),
        pytest.param(Answered("x", 300, 256), Answered("x", 300, 256), "right WRONG right", id="salt ignored"),
    ],
)
def test_answers_are_judged(warm: Answered, salted: Answered | None, verdicts: str) -> None:
    found = judge("e", "vllm", COLD, warm, salted)
    assert " ".join(each.verdict.value for each in found) == verdicts


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"enable_prefix_caching": "False"}, "prefix caching is off"),
        ({"block_size": "48"}, "chunks of 256 tokens aren't a multiple of its blocks of 48"),
        ({"prefix_caching_hash_algo": "xxhash"}, "block hashes are xxhash"),
    ],
)
def test_what_vllm_was_started_with_shows_in_its_metrics(labels: dict[str, str], says: str) -> None:
    well = {"enable_prefix_caching": "True", "block_size": "32", "prefix_caching_hash_algo": "sha256"}
    assert [each.verdict for each in check_cache_config("e", well, 256)] == [Verdict.RIGHT]
    (found,) = check_cache_config("e", well | labels, 256)
    assert found.verdict is Verdict.WRONG
    assert found.says.startswith(says)
    assert "start" in found.mend


def test_a_failure_policy_that_fails_requests_is_found() -> None:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "replay_endpoint": "ipc://r"}
    well = {"kv_transfer_config": {"kv_load_failure_policy": "recompute"}, "kv_events_config": events}
    assert check_server_info("e", well) == []
    assert (
        "recompute" in check_server_info("e", well | {"kv_transfer_config": {"kv_load_failure_policy": "fail"}})[0].mend
    )
    assert "--kv-events-config" in check_server_info("e", well | {"kv_events_config": None})[0].mend
    (found,) = check_server_info("e", well | {"kv_events_config": {**events, "replay_endpoint": None}})
    assert found.verdict is Verdict.NOTE


def member(registration: object, remaining_s: float = 5.0, **load: bool) -> Member:
    return Member(draw_incarnation(), registration, Load(**load), remaining_s)  # type: ignore[arg-type]


def test_a_table_is_right_where_all_is_live() -> None:
    table = [
        member(HostRegistration("h", "http://h")),
        member(engine_registration("e")),
        member(engine_registration("e")),
    ]
    (found,) = check_table(table, {})
    assert found.verdict is Verdict.RIGHT, "a walk has two lives at one place"


def test_a_gateway_that_went_without_a_word_is_no_trouble() -> None:
    table = [member(HostRegistration("h", "http://h")), member(GatewayRegistration("g", "http://g"), -30.0)]
    (found,) = check_table(table, {})
    assert found.verdict is Verdict.RIGHT


def test_a_table_without_anybody_is_no_healthy_fleet() -> None:
    (found,) = check_table([], {})
    assert found.verdict is Verdict.NOTE
    assert "--key-prefix" in found.mend


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (member(HostRegistration("h", "http://elsewhere")), "2 hosts go by this name"),
        (member(engine_registration("gone"), -30.0), "this engine's registration lapsed 30 s ago"),
        (member(HostRegistration("full", "http://f"), is_directory_full=True), "its placements are refused"),
    ],
)
def test_rows_that_dont_fit_are_found(row: Member, says: str) -> None:
    found = check_table([member(HostRegistration("h", "http://h")), row], {})
    assert [each.says.startswith(says) for each in found if each.verdict is Verdict.WRONG] == [True]


@pytest.mark.parametrize(
    ("fields", "word", "verdict"),
    [
        ({"weights_sha": "c" * 64}, "weights", Verdict.WRONG),
        ({"tokenizer_sha": "c" * 64}, "tokenizer", Verdict.WRONG),
        ({"kv_dtype": "fp8"}, "KV type", Verdict.NOTE),
        ({"layout": "other"}, "KV layout", Verdict.NOTE),
    ],
)
def test_engines_of_a_model_that_differ_are_found(fields: dict[str, str], word: str, verdict: Verdict) -> None:
    other = engine_registration("e2", identity=dataclasses.replace(IDENTITY, **fields))
    assert check_engines([engine_registration("e1"), engine_registration("e2")]) == []
    (found,) = check_engines([engine_registration("e1"), other])
    assert found.verdict is verdict
    assert f"different {word} (" in found.says
    assert "e1" in found.says


def test_chunk_sizes_and_versions_that_differ_are_noted() -> None:
    (found,) = check_engines([engine_registration("e1"), engine_registration("e2", chunk_tokens=8)])
    assert found.says.startswith("its engines have different chunk size (e1: 4; e2: 8)")
    (found,) = check_versions({"gateway": "0.1", "agent of h": "0.2"})
    assert found.says == "parts of different versions: 0.1: gateway; 0.2: agent of h"


def test_the_odd_clock_is_found_by_the_others() -> None:
    away = [Reading("a", 30.0, 0.1), Reading("b", 30.1, 0.1), Reading("c", 29.9, 0.1)]
    assert [each.subject for each in check_clocks(away)] == ["here"]
    assert [each.subject for each in check_clocks([Reading("a", 0.1, 0.5), Reading("b", -9.0, 0.5)])] == ["b"]
    assert check_clocks([Reading("a", 2.4, 0.5)])[0].verdict is Verdict.RIGHT, "as far as it can be told"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"eviction_policy": "volatile-lru", "memory_limit_bytes": 10**8},
            "maxmemory-policy volatile-lru throws records",
        ),
        ({"memory_used_bytes": 95, "memory_limit_bytes": 100}, "95% of maxmemory is used"),
        ({"functions": "missing"}, "the directory's functions aren't loaded"),
        ({"functions": "other"}, "another release's functions"),
        ({"role": "slave"}, "it is a slave"),
        ({"last_save_ok": False}, "its last snapshot failed"),
        ({"error": "refused"}, "doesn't answer"),
    ],
)
def test_a_server_that_endangers_the_directory_is_found(fields: dict[str, object], says: str) -> None:
    well = ServerReport(
        "s", "valkey 9", "master", 0, 1, 10**9, "noeviction", 0, append_only=False, last_save_ok=True,
        functions="current",
    )  # fmt: skip
    assert [each.verdict for each in check_server(well)] == [Verdict.RIGHT]
    (found,) = check_server(dataclasses.replace(well, **fields))  # type: ignore[arg-type]
    assert found.verdict is Verdict.WRONG
    assert found.says.startswith(says)
    assert found.mend


@pytest.mark.parametrize(
    ("drive", "says"),
    [
        ({"is_up": False, "failure": "EIO"}, "is in quarantine: EIO"),
        ({"is_crowded": True}, "is nearly full by others"),
        ({"is_write_paused": True}, "is paused"),
    ],
)
def test_a_drive_that_is_off_is_found(drive: dict[str, object], says: str) -> None:
    status = {"tiers": {"nvme": {"drives": [{"drive": "/d", "is_up": True, "is_direct": True}]}}}
    assert check_status("h", status) == []
    status["tiers"]["nvme"]["drives"][0] |= drive  # type: ignore[operator]
    (found,) = check_status("h", status)
    assert says in found.says
    assert found.mend


def test_an_agent_tells_of_memory_events_and_directory() -> None:
    engine = {"engine": "e", "is_connected": True, "gpu_is_known": False}
    status = {"directory": "unavailable", "tiers": {"dram": {"refusal": "no memory"}}, "engines": [engine]}
    words = " ".join(each.says for each in check_status("h", status))
    assert "it can't announce: unavailable" in words
    assert "no DRAM tier: no memory" in words
    assert "what the GPU of e holds isn't known" in words
    assert check_status("h", {"engines": [{"engine": "e", "is_connected": False}]})[0].verdict is Verdict.WRONG


def test_a_gateway_tells_of_its_engines() -> None:
    well = {
        "engine": "e",
        "host": "h",
        "state": "ready",
        "encoding": "exact",
        "placements": "believed",
        "tokenizer": "fastokens",
    }
    table = {"directory": "ok", "lookups": "none yet", "engines": [well]}
    assert [each.verdict for each in check_fleet(table)] == [Verdict.RIGHT]
    for changed, says in (
        ({"state": "unwell"}, "unwell"),
        ({"encoding": "file 12 is not to be had"}, "its prompts can't be encoded"),
        ({"encoding": "exact; new files: not a tokenizer.json"}, "its files changed, and can't be used"),
        ({"placements": "not believed"}, "what it holds isn't believed"),
    ):
        (found,) = check_fleet(table | {"engines": [well | changed]})
        assert found.verdict is Verdict.WRONG
        assert found.says.startswith(says)
    for changed, says in (
        ({"encoding": "token ids only: the tokenizer isn't known"}, "its prompts of text aren't encoded"),
        (
            {"host": None, "placements": "none without an agent"},
            "without an agent: routed by what its prompts begin with",
        ),
    ):
        (found,) = check_fleet(table | {"engines": [well | changed]})
        assert found.verdict is Verdict.NOTE
        assert found.says.startswith(says)
    (found,) = check_fleet(table | {"directory": "many lapsed"})
    assert found.says.startswith("more than half of the fleet's registrations lapsed at once")
    assert check_fleet(table | {"engines": []})[0].says == "it knows no engine"
    bucket = {"engine": "e", "endpoint": "/v1/chat/completions", "tools": True, "state": "approximate", "reason": "ids"}
    (found,) = check_fleet(table | {"parity": {"buckets": [{"state": "exact"}, bucket]}})
    assert found.says == "/v1/chat/completions tools: answers differ from what is encoded (ids)"
    (found,) = check_fleet(table | {"parity": {"buckets": [bucket | {"tools": False}]}})
    assert found.says.startswith("/v1/chat/completions: answers differ")
    (found,) = check_degraded('warmroute_degraded_total{reason="not_encoded_tools"} 3.0\n')
    assert found.says.endswith("not_encoded_tools 3")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1"])
def test_a_loopback_is_known(url: str) -> None:
    assert is_loopback(url)
    assert not is_loopback("http://10.0.0.1:1")
    assert not is_loopback("http://gateway:1")


def test_an_agent_that_registers_loopback_in_a_fleet_of_many_machines_is_found() -> None:
    assert check_place("h", "http://127.0.0.1:1", is_fleet_elsewhere=False) == []
    assert check_place("h", "http://10.0.0.1:1", is_fleet_elsewhere=True) == []
    assert "set listen.bind and listen.url" in check_place("h", "http://127.0.0.1:1", True)[0].mend


R, N, W = right("ids", "a", "well"), note("ids", "a", "odd", "change"), wrong("ids", "a", "bad", "mend it")
U, F = unknown("ids", "a", "no way"), failed("ids", "a", "silent")


@pytest.mark.parametrize(
    ("findings", "status"),
    [([R], 0), ([R, N, U], 0), ([R, F], 2), ([U], 2), ([], 2), ([R, W, F], 1)],
    ids=["right", "noted", "failed", "nothing seen", "nothing", "wrong"],
)
def test_the_exit_status_says_how_it_went(findings: list[Finding], status: int) -> None:
    assert exit_status(findings) == status


def test_notes_can_count() -> None:
    assert exit_status([R, N], is_strict=True) == 1


@pytest.mark.parametrize("width", [40, 80, 120, 400])
def test_a_page_fits_its_terminal(width: int) -> None:
    findings = [R, wrong("cache", "b" * 60, "much " * 80, "do " * 80), note("ids", "c", "\x1b[31mred", "x")]
    lines = as_page(findings, width).splitlines()
    assert max(len(line) for line in lines if "b" * 60 not in line) <= max(width, 60)
    assert "\x1b" not in "".join(lines)
    assert lines[0] == "ids"
    assert lines[-1] == "1 wrong, 1 note, 0 not checked, 1 right"
