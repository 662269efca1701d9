"""Which requests lose belief, when it comes back, and how much is remembered."""

import logging
from dataclasses import dataclass, replace

import pytest

from directory.placements import Reach
from gateway.encoding.model_files import ModelFiles
from gateway.fleet import EngineView
from gateway.openai_schema import CHAT, InferenceRequest
from gateway.parity import buckets as module
from gateway.parity.buckets import Buckets, Kind, kind_of
from tests.gateway.samples import MODEL
from tests.gateway.views import view

PLAIN = Kind(MODEL, CHAT, has_tools=False, has_reasoning=False)
TOOLS = replace(PLAIN, has_tools=True)
FIRST, SECOND, THIRD = b"1" * 8, b"2" * 8, b"3" * 8


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def living(*lives: bytes, engine: str = "a", **other: object) -> EngineView:
    return replace(view(engine, **other), reach=Reach(engine, frozenset(lives), frozenset()))


def note(buckets: Buckets, seen: EngineView, times: int, theirs: int = 9, kind: Kind = PLAIN) -> None:
    for _ in range(times):
        buckets.note_counts(seen, kind, 9, theirs)


def turned(seen: EngineView | None = None) -> Buckets:
    buckets = Buckets(Clock())
    note(buckets, seen or living(FIRST), 20, theirs=12)
    assert buckets.approximate(PLAIN) == {"a"}
    return buckets


@pytest.mark.parametrize(
    ("fields", "has_tools", "has_reasoning"),
    [
        ({}, False, False),
        ({"tools": [], "chat_template_kwargs": {}, "reasoning_effort": None}, False, False),
        ({"tools": [{}]}, True, False),
        ({"reasoning_effort": "high"}, False, True),
        ({"chat_template_kwargs": {"x": 1}, "tools": [{}]}, True, True),
        ({"thinking": {"type": "enabled"}}, False, True),
    ],
)
def test_the_kind_of_a_request_is_read_from_its_fields(
    fields: dict[str, object], has_tools: bool, has_reasoning: bool
) -> None:
    request = InferenceRequest(CHAT, b"{}", fields, MODEL, False, None)
    assert kind_of(request) == Kind(MODEL, CHAT, has_tools, has_reasoning)


def test_only_the_kind_and_the_engine_that_differ_turn() -> None:
    buckets = Buckets(Clock())
    for engine, kind, theirs in (("a", TOOLS, 12), ("a", PLAIN, 9), ("b", TOOLS, 9)):
        note(buckets, living(FIRST, engine=engine), 20, theirs, kind)
    assert buckets.approximate(TOOLS) == {"a"}
    assert buckets.approximate(PLAIN) == frozenset()
    assert buckets.approximate_count == 1


def test_it_is_said_once_when_a_bucket_turns_and_once_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    buckets = Buckets(Clock())
    note(buckets, living(FIRST), 50, theirs=12)
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "9 tokens here, 12 there" in warning.getMessage()
    note(buckets, living(FIRST), 50)
    assert buckets.approximate(PLAIN) == frozenset()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_counts_that_agree_do_not_excuse_ids_that_differ() -> None:
    buckets = Buckets(Clock())
    for _ in range(20):
        buckets.note_counts(living(FIRST), PLAIN, 9, 9)
        buckets.note_ids(living(FIRST), PLAIN, False)
    assert buckets.approximate(PLAIN) == {"a"}
    assert buckets.rows()[0]["reason"] == "ids"
    for _ in range(5):
        buckets.note_ids(living(FIRST), PLAIN, True)
    assert buckets.approximate(PLAIN) == frozenset()


@pytest.mark.parametrize(
    "now",
    [
        living(SECOND),
        living(FIRST, renderer="vllm"),
        living(FIRST, tokenizer_files={"tokenizer.json": "c" * 64}),
    ],
    ids=["another life", "another renderer", "other files"],
)
def test_an_engine_that_is_another_now_is_believed_at_its_first_answer(now: EngineView) -> None:
    buckets = turned()
    note(buckets, now, 1)
    assert buckets.approximate(PLAIN) == frozenset()


def test_an_engine_without_an_agent_is_another_when_its_files_are() -> None:
    old, new = ModelFiles("vllm", (("tokenizer.json", "a"),)), ModelFiles("vllm", (("tokenizer.json", "b"),))
    static = replace(living(), registration=None, configured_files=old)
    buckets = turned(static)
    note(buckets, static, 1, theirs=12)
    assert buckets.approximate(PLAIN) == {"a"}
    note(buckets, replace(static, configured_files=new), 1)
    assert buckets.approximate(PLAIN) == frozenset()


def test_a_walk_of_the_same_engine_changes_nothing() -> None:
    buckets = turned()
    for lives in ((FIRST, SECOND), (SECOND,), (), (SECOND,)):
        note(buckets, living(*lives), 1, theirs=12)
        assert buckets.approximate(PLAIN) == {"a"}
    note(buckets, living(), 1, theirs=12)
    note(buckets, living(THIRD), 1, theirs=12)
    assert buckets.approximate(PLAIN) == frozenset(), "and one that wasn't believed meanwhile isn't forgotten"


def test_buckets_of_engines_that_went_and_idle_ones_are_let_go() -> None:
    clock = Clock()
    buckets = Buckets(clock)
    for engine in ("a", "b"):
        note(buckets, living(FIRST, engine=engine), 20, theirs=12)
    buckets.keep({"a": None})
    assert buckets.approximate(PLAIN) == {"a"}
    clock.now += module.IDLE_S + 1
    buckets.keep({"a": None})
    assert (buckets.rows(), buckets.approximate_count) == ([], 0)


def test_buckets_are_bounded_and_the_longest_unused_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKETS_MAX", 3)
    buckets = Buckets(Clock())
    for engine in ("a", "b", "c", "a", "d"):
        note(buckets, living(FIRST, engine=engine), 20, theirs=12)
    assert buckets.approximate(PLAIN) == {"a", "c", "d"}
    assert {row["engine"] for row in buckets.rows()} == {"a", "c", "d"}


def test_a_row_says_what_differs_since_when_and_by_how_much() -> None:
    clock = Clock()
    buckets = Buckets(clock)
    note(buckets, living(FIRST, engine="well"), 30)
    note(buckets, living(FIRST), 10, theirs=12)
    clock.now += 7
    first, second = buckets.rows()
    assert first == {
        "engine": "a",
        "model": MODEL,
        "endpoint": CHAT,
        "tools": False,
        "reasoning": False,
        "state": "approximate",
        "reason": "token counts",
        "state_seconds": 7.0,
        "answers": 10,
        "answers_different": 10,
        "ids_looked_for": 0,
        "ids_not_found": 0,
        "example": {"own_tokens": 9, "engine_tokens": 12},
    }
    assert (second["engine"], second["state"], second["example"]) == ("well", "exact", None)
