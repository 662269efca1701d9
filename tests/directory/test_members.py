"""What stands in the fleet's table: written, read back, and refused where it can't be right."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.costs import ModelShape, Rates
from directory.errors import IdentityRefused
from directory.identity import Identity
from directory.members import (
    BOOKED_RUNNING_MAX,
    ENGINES_BOOKED_MAX,
    INCARNATION_BYTES,
    PEER_ADDRESS_CHARS_MAX,
    PEERS_REPORTED_MAX,
    ROW_BYTES_MAX,
    TEXT_CHARS_MAX,
    BookedWork,
    EngineRegistration,
    GatewayRegistration,
    HostRegistration,
    Load,
    Member,
    Registration,
    UnreadableMember,
    decode_load,
    decode_registration,
    draw_incarnation,
    encode_load,
    encode_registration,
    name_of,
    place_of,
    role_of,
)
from directory.tiers import Tier
from tests.directory.fleet_samples import BOOKED, ENGINE, GATEWAY, HOST, LOAD, incarnation

TEXT = st.text(st.characters(blacklist_categories=("Cs",)).filter(str.isprintable), max_size=12)
PLAIN = st.text("abcxyz-./é", min_size=1, max_size=12)
AMOUNTS = st.integers(0, 2**62)
SPEEDS = st.floats(1e-3, 1e18)
PAGED_CHUNKS = st.integers(1, 64).flatmap(lambda page: st.tuples(st.just(page), st.integers(1, 64).map(page.__mul__)))


URLS = TEXT.map("http://a/{}".format)


@st.composite
def engines(draw: st.DrawFn) -> EngineRegistration:
    page_tokens, chunk_tokens = draw(PAGED_CHUNKS)
    return EngineRegistration(
        engine=draw(TEXT),
        host=draw(TEXT),
        url=draw(URLS),
        models=tuple(draw(st.lists(TEXT, max_size=3))),
        identity=draw(st.builds(Identity, PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, st.integers(1, 8))),
        shape=draw(
            st.builds(ModelShape, st.floats(1, 1e13), st.integers(1, 200), st.integers(1, 9999), st.integers(1, 2**40))
        ),
        chunk_tokens=chunk_tokens,
        context_tokens=draw(st.integers(1, 2**24)),
        key_scheme=draw(st.sampled_from(("warmroute", "sglang", "lmcache-mp"))),
        page_tokens=draw(st.sampled_from((None, page_tokens))),
        tokenizer_files=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        kv_tokens=draw(st.none() | st.integers(1, 10**9)),
    )


MILLISECONDS = st.integers(0, 10**8).map(lambda number: number / 1000)
TIERS = st.sampled_from(list(Tier))
HOSTS = st.builds(HostRegistration, TEXT, URLS, st.none() | TEXT)
LOADS = st.builds(
    Load,
    st.none() | st.builds(Rates, SPEEDS, st.dictionaries(TIERS, SPEEDS), st.dictionaries(TIERS, st.floats(0, 10))),
    st.dictionaries(TIERS, AMOUNTS),
    st.dictionaries(TIERS, AMOUNTS),
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.booleans(),
    st.dictionaries(TEXT, SPEEDS, max_size=3),
    st.integers(0, 10**7),
    st.dictionaries(
        TEXT,
        st.builds(
            BookedWork,
            st.integers(10**5, 10**6),
            *[st.integers(0, 3_600_000).map(lambda number: number / 1000)] * 3,
            st.integers(50_000, 60_000),
            st.integers(60_000, BOOKED_RUNNING_MAX),
            *[st.integers(0, 10**9)] * 2,
            MILLISECONDS,
        ),
        max_size=3,
    ),
)


@given(registration=engines() | HOSTS | st.builds(GatewayRegistration, TEXT, TEXT))
def test_a_registration_is_read_as_it_was_written(registration: Registration) -> None:
    assert decode_registration(encode_registration(registration)) == registration


@given(load=LOADS)
def test_a_load_is_read_as_it_was_written(load: Load) -> None:
    assert decode_load(encode_load(load)) == load


@pytest.mark.parametrize("registration", [HOST, ENGINE, GATEWAY], ids=["host", "engine", "gateway"])
def test_fields_of_a_newer_version_are_ignored(registration: Registration) -> None:
    row = json.loads(encode_registration(registration)) | {"colour": "blue"}
    if "identity" in row:
        row["identity"]["epoch"] = 7
        row["shape"]["experts"] = 8
    assert decode_registration(json.dumps(row).encode()) == registration


@pytest.mark.parametrize(
    "change",
    [
        {"role": "ghost"},
        {"role": None},
        {"engine": None},
        {"url": 7},
        {"models": "llama"},
        {"models": [1]},
        {"identity": None},
        {"identity": {"model_id": "a|b"}},
        {"shape": {}},
        {"shape": {"parameters": 0, "layers": 1, "d_model": 1, "kv_bytes_per_token": 1}},
        {"shape": {"parameters": "8e9", "layers": 1, "d_model": 1, "kv_bytes_per_token": 1}},
        {"chunk_tokens": 0},
        {"chunk_tokens": "256"},
        {"context_tokens": -1},
        {"key_scheme": "sha1"},
        {"page_tokens": 100},
        {"page_tokens": "64"},
        {"kv_tokens": 0},
        {"kv_tokens": "64"},
        {"kv_tokens": 0.5},
        {"chunk_tokens": 256.5},
        {"shape": {"parameters": 8e9, "layers": 10**300, "d_model": 1, "kv_bytes_per_token": 1}},
        {"shape": {"parameters": float("inf"), "layers": 1, "d_model": 1, "kv_bytes_per_token": 1}},
        {"engine": "a\ud800"},
        {"url": "http://a\r\nx-more: b"},
        {"url": "http://10.0.0.1:99999"},
        {"url": "http://10.0.0.1:-1"},
        {"shape": {"parameters": 8e9, "layers": 1, "d_model": 1, "kv_bytes_per_token": 1e-310}},
        {"host": "\x1b[31m"},
        {"models": ["\ud800"]},
        {"models": ["x" * (TEXT_CHARS_MAX + 1)]},
        {"renderer": 7},
        {"tokenizer_files": {"tokenizer.json": 7}},
    ],
    ids=lambda change: json.dumps(change)[:40],
)
def test_an_engine_that_cannot_be_right_is_unreadable(change: dict[str, object]) -> None:
    row = json.loads(encode_registration(ENGINE)) | change
    with pytest.raises(UnreadableMember):
        decode_registration(json.dumps(row).encode())


def test_a_whole_number_may_be_written_as_some_languages_do() -> None:
    row = json.loads(encode_registration(ENGINE)) | {"chunk_tokens": 256.0, "page_tokens": 64.0}
    read = decode_registration(json.dumps(row).encode())
    assert isinstance(read, EngineRegistration)
    assert [type(tokens) for tokens in (read.chunk_tokens, read.page_tokens)] == [int, int]


@pytest.mark.parametrize("field", ["role", "engine", "url", "models", "identity", "shape", "chunk_tokens"])
def test_an_engine_without_a_field_it_needs_is_unreadable(field: str) -> None:
    row = json.loads(encode_registration(ENGINE))
    del row[field]
    with pytest.raises(UnreadableMember):
        decode_registration(json.dumps(row).encode())


@pytest.mark.parametrize(
    "rates",
    [
        {"flops": 0},
        {"flops": -1},
        {"flops": 1e-310},
        {"flops": "fast"},
        {"flops": True},
        {"flops": float("nan")},
        {"flops": 10**400},
        {"bytes_per_s": {"2": 0}},
        {"bytes_per_s": {"2": 1e-310}},
        {"bytes_per_s": {"dram": 1}},
        {"fixed_s": {"2": -1}},
        {"fixed_s": None},
    ],
    ids=str,
)
def test_a_rate_that_routing_could_not_divide_by_is_unreadable(rates: dict[str, object]) -> None:
    row = json.loads(encode_load(LOAD))
    row["rates"] |= rates
    with pytest.raises(UnreadableMember):
        decode_load(json.dumps(row).encode())


@pytest.mark.parametrize(
    "peers",
    [
        [],
        ["a:1"],
        7,
        {"a:1": 0},
        {"a:1": 1e-310},
        {"a:1": -1},
        {"a:1": "fast"},
        {"a:1": True},
        {"a:1": float("inf")},
        {"a\n:1": 1.0},
        {"a" * (PEER_ADDRESS_CHARS_MAX + 1): 1.0},
        {f"a:{number}": 1.0 for number in range(PEERS_REPORTED_MAX + 1)},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_report_of_peers_that_cannot_be_right_is_unreadable(peers: object) -> None:
    row = json.loads(encode_load(LOAD)) | {"peers": peers}
    with pytest.raises(UnreadableMember):
        decode_load(json.dumps(row).encode())


def test_a_report_of_as_many_peers_as_there_may_be_is_read() -> None:
    load = replace(LOAD, peer_bytes_per_s={f"host-{number}:1": 1e9 for number in range(PEERS_REPORTED_MAX)})
    assert decode_load(encode_load(load)) == load


@pytest.mark.parametrize("load", [LOAD, Load()], ids=["full", "empty"])
def test_who_has_measured_no_peer_reports_as_versions_do_that_know_of_none(load: Load) -> None:
    assert "peers" not in json.loads(encode_load(load))


@pytest.mark.parametrize(
    "booked",
    [
        [7],
        7,
        {"a": {}},
        {"a": []},
        {"a": [1, 2, 3, 4, 5, 6, 7, 8]},
        {"a": [-1, 0, 0, 0, 0, 0, 0, 0, 0]},
        {"a": ["1", 0, 0, 0, 0, 0, 0, 0, 0]},
        {"a": [0, 0, 0, 0, True, 0, 0, 0, 0]},
        {"a": [float("inf"), 0, 0, 0, 0, 0, 0, 0, 0]},
        {"a\n": [0] * 9},
        {"a": [1e9, 0, 0, 0, 2, 2, 0, 0, 0]},
        {"a": [9, 20, 0, 0, 2, 2, 0, 0, 0]},
        {"a": [9, 2, 1e9, 0, 2, 2, 0, 0, 0]},
        {"a": [9, 2, 0, 1e9, 2, 2, 0, 0, 0]},
        {"a": [1e9, 0, 0, 0, 0, 0, 0, 0, 0]},
        {"a": [0, 0, 0, 0, 0, 10**9, 0, 0, 0]},
        {"a": [0, 0, 0, 0, 3, 2, 0, 0, 0]},
        {f"engine-{number}": [0] * 9 for number in range(ENGINES_BOOKED_MAX + 1)},
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_report_of_what_is_booked_that_cannot_be_right_is_unreadable(booked: object) -> None:
    row = json.loads(encode_load(LOAD)) | {"booked": booked}
    with pytest.raises(UnreadableMember):
        decode_load(json.dumps(row).encode())


@pytest.mark.parametrize(
    "idle",
    [
        [7],
        {"a": {}},
        {"a": [1]},
        {"a": [-1, 0]},
        {"a": [True, 0]},
        {"a": [float("nan"), 0]},
        {"a\n": [0, 0]},
        {f"engine-{number}": [0, 0] for number in range(ENGINES_BOOKED_MAX)},
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_report_of_what_was_given_lately_that_cannot_be_right_is_unreadable(idle: object) -> None:
    row = json.loads(encode_load(LOAD)) | {"booked": {"one": [0] * 9}, "idle": idle}
    with pytest.raises(UnreadableMember):
        decode_load(json.dumps(row).encode())


def test_what_a_newer_version_reports_of_an_engine_besides_is_ignored() -> None:
    row = json.loads(encode_load(BOOKED))
    for packed in (*row["booked"].values(), *row["idle"].values()):
        packed.append("more")
    assert decode_load(json.dumps(row).encode()) == BOOKED


def test_an_older_versions_report_of_engines_with_nothing_open_is_read() -> None:
    row = json.loads(encode_load(Load()))
    row["booked"] = {"engine-c": [0.0, 0.0, 3600.0, 0.5, 0, 0, 0, 0, 2.25]}
    assert decode_load(json.dumps(row).encode()).booked == {"engine-c": BookedWork(0, 0, 3600, 0.5, recent_s=2.25)}


def test_an_engine_with_nothing_open_takes_less_than_half_of_a_report() -> None:
    work = BookedWork(1.25, 0.5, 0.125, 0.25, 3, 12, 5000, 80000, 7.5)
    closed = BookedWork(free_age_s=0.25, recent_s=7.5)
    sizes = [len(encode_load(Load(booked={f"{n}": each for n in range(64)}))) for each in (work, closed)]
    assert sizes[1] < sizes[0] / 2


@pytest.mark.parametrize("load", [LOAD, Load()], ids=["full", "empty"])
def test_who_has_booked_nothing_reports_as_versions_do_that_know_of_no_booking(load: Load) -> None:
    assert "booked" not in json.loads(encode_load(load))


@pytest.mark.parametrize("change", [{"gateway": None}, {"url": 7}, {"gateway": "a\nb"}], ids=str)
def test_a_gateway_that_cannot_be_right_is_unreadable(change: dict[str, object]) -> None:
    row = json.loads(encode_registration(GATEWAY)) | change
    with pytest.raises(UnreadableMember):
        decode_registration(json.dumps(row).encode())


@pytest.mark.parametrize(
    ("registration", "role", "name", "place"),
    [
        (HOST, "host", "host-a", "http://10.0.0.1:9100"),
        (ENGINE, "engine", "engine-a", "http://10.0.0.1:8000"),
        (GATEWAY, "gateway", "gateway-a:8000", "http://10.0.0.9:8001"),
    ],
    ids=["host", "engine", "gateway"],
)
def test_every_member_has_a_role_a_name_and_a_place(
    registration: Registration, role: str, name: str, place: str
) -> None:
    assert (role_of(registration), name_of(registration), place_of(registration)) == (role, name, place)


@pytest.mark.parametrize("address", [7, [], "a:1\r\nx: y", "a" * (PEER_ADDRESS_CHARS_MAX + 1)], ids=repr)
def test_a_host_whose_peer_address_cannot_be_right_is_unreadable(address: object) -> None:
    row = json.loads(encode_registration(HOST)) | {"peer_address": address}
    with pytest.raises(UnreadableMember):
        decode_registration(json.dumps(row).encode())


@pytest.mark.parametrize("port", ["99999", "-1", "x"])
def test_a_host_whose_agent_has_a_port_that_there_cannot_be_is_unreadable(port: str) -> None:
    row = json.loads(encode_registration(HOST)) | {"agent_url": f"http://10.0.0.1:{port}"}
    with pytest.raises(UnreadableMember):
        decode_registration(json.dumps(row).encode())


def test_a_host_of_a_version_that_knows_of_no_peers_has_no_peer_address() -> None:
    row = json.loads(encode_registration(HOST))
    del row["peer_address"]
    assert decode_registration(json.dumps(row).encode()) == HOST


def test_an_engine_of_a_version_that_says_nothing_of_its_kv_cache_is_one_of_which_nothing_is_known() -> None:
    row = json.loads(encode_registration(ENGINE))
    del row["kv_tokens"]
    assert decode_registration(json.dumps(row).encode()) == replace(ENGINE, kv_tokens=None)


@given(data=st.binary(max_size=60))
def test_any_bytes_are_read_or_unreadable_and_nothing_else(data: bytes) -> None:
    for decode in (decode_registration, decode_load):
        with suppress(UnreadableMember):
            decode(data)  # type: ignore[operator]


@given(data=st.recursive(st.none() | st.booleans() | st.floats() | TEXT, lambda deeper: st.lists(deeper, max_size=3)))
def test_any_json_in_place_of_a_field_is_read_or_unreadable(data: object) -> None:
    for field in json.loads(encode_registration(ENGINE)):
        row = json.loads(encode_registration(ENGINE)) | {field: data}
        with suppress(UnreadableMember):
            decode_registration(json.dumps(row).encode())


def test_a_row_that_is_too_long_is_unreadable_before_it_is_parsed() -> None:
    for decode in (decode_registration, decode_load):
        for data in (encode_registration(ENGINE), encode_load(LOAD)):
            with pytest.raises(UnreadableMember, match="longer than"):
                decode(data + b" " * ROW_BYTES_MAX)  # type: ignore[operator]


def test_no_report_is_an_empty_load() -> None:
    assert decode_load(b"") == Load()


def test_a_registration_is_decoded_once_however_often_it_is_read() -> None:
    data = encode_registration(ENGINE)
    assert decode_registration(data) is decode_registration(bytes(bytearray(data)))
    assert decode_registration(encode_registration(replace(ENGINE, url="http://other:1"))).url == "http://other:1"


@pytest.mark.parametrize("data", [None, 7, "text", [], {}, bytearray(b"{}")], ids=repr)
def test_a_registration_that_is_no_bytes_is_unreadable(data: object) -> None:
    with pytest.raises(UnreadableMember):
        decode_registration(data)  # type: ignore[arg-type]


def test_incarnations_are_drawn_at_random() -> None:
    drawn = {draw_incarnation() for _ in range(1000)}
    assert len(drawn) == 1000
    assert {len(each) for each in drawn} == {INCARNATION_BYTES}


@pytest.mark.parametrize(
    ("remaining_s", "retired", "live"),
    [(1.0, False, True), (0.0, False, False), (-1.0, False, False), (1.0, True, False), (3593.0, False, False)],
)
def test_a_life_is_live_within_its_term_and_before_it_is_retired(remaining_s: float, retired: bool, live: bool) -> None:
    assert Member(incarnation(1), HOST, LOAD, remaining_s, retired).is_live is live


@pytest.mark.parametrize(
    "change", [{"key_scheme": "sha1"}, {"chunk_tokens": 0}, {"page_tokens": 0}, {"page_tokens": 100}], ids=str
)
def test_an_engine_whose_keys_could_not_be_built_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(IdentityRefused):
        replace(ENGINE, **change)  # type: ignore[arg-type]
