"""Whatever may change a living engine's weights is noticed before it begins, and nothing else is."""

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nodeagent.engines.vllm.settings import SettingsRefused
from nodeagent.engines.vllm.weight_changes import (
    CHANGING_METHODS,
    HARMLESS_CALLS,
    WeightChanges,
    watch_entries,
    watch_worker,
)


def worker_class(changes: WeightChanges, *without: str) -> type[Any]:
    """A worker like vLLM's, of which each method says whether the change was known when it began."""

    def method(name: str) -> Any:
        def called(self: Any, *arguments: Any, **named: Any) -> bool:
            return changes.have_changed

        called.__name__ = name
        return called

    names = {*CHANGING_METHODS, *HARMLESS_CALLS} - set(without)
    return type("Worker", (), {name: method(name) for name in names})


def model_runner(*sources: Any) -> SimpleNamespace:
    return SimpleNamespace(get_model=lambda: SimpleNamespace(secondary_weights=sources))


def watched(*without: str) -> tuple[Any, WeightChanges]:
    changes = WeightChanges()
    kind = worker_class(changes, *without)
    watch_worker(kind, "/m", changes)
    watch_worker(kind, "/m", changes)
    worker = kind()
    worker.model_runner = model_runner()
    return worker, changes


@pytest.mark.parametrize("name", sorted(set(CHANGING_METHODS) - {"sleep", "discard"}))
def test_a_change_is_known_before_it_begins(name: str) -> None:
    worker, changes = watched()
    assert getattr(worker, name)() is True
    assert changes.have_changed


def test_a_sleep_that_keeps_the_weights_changes_nothing() -> None:
    worker, _ = watched()
    for call in (worker.sleep, lambda: worker.sleep(1), lambda: worker.sleep(level=1), worker.wake_up):
        assert call() is False
    assert worker.discard(("kv_cache",)) is False
    assert worker.sleep(level=2) is True


def test_a_discard_of_weights_is_a_change() -> None:
    assert watched()[0].discard(tags=("weights", "kv_cache")) is True


@pytest.mark.parametrize("name", CHANGING_METHODS)
def test_a_worker_without_an_expected_method_is_refused(name: str) -> None:
    with pytest.raises(SettingsRefused, match=f"vLLM's worker has no {name}"):
        watched(name)


def test_parts_from_elsewhere_are_noticed_before_the_engine_serves() -> None:
    for path, subfolder, changed in (("/m", None, False), ("/m", "s", True), ("other/audio", None, True)):
        worker, changes = watched()
        worker.model_runner = model_runner(SimpleNamespace(model_or_path=path, subfolder=subfolder))
        worker.compile_or_warm_up_model()
        assert changes.have_changed is changed


@pytest.mark.parametrize("way", ["uniproc", "multiproc"])
@pytest.mark.parametrize(
    ("method", "given", "changed"),
    [
        *[(name, {}, False) for name in ("execute_model", "sample_tokens", "add_lora", "reset_mm_cache")],
        ("sleep", {"level": 1}, False),
        ("sleep", {"level": 2}, True),
        ("reload_weights", {}, True),
        ("a_method_of_tomorrow", {}, True),
        ("__setattr__", {}, True),
        (b"pickled code", {}, True),
        (print, {}, True),
    ],
)
def test_a_call_that_is_not_known_to_be_harmless_is_a_change(
    way: str, method: Any, given: dict[str, Any], changed: bool
) -> None:
    changes, seen = WeightChanges(), []
    module = ModuleType(way)
    if way == "uniproc":
        module.run_method = lambda worker, *call: seen.append(call)  # type: ignore[attr-defined]
    else:
        module.WorkerProc = type(  # type: ignore[attr-defined]
            "WorkerProc", (), {"_execute_worker_rpc": lambda self, request: seen.append(request[:3])}
        )
    modules = {f"vllm.v1.executor.{way}_executor": module}
    for _ in range(2):
        watch_entries(modules, changes)
    if way == "uniproc":
        module.run_method(None, method, (), given)
    else:
        module.WorkerProc()._execute_worker_rpc((method, (), given, None))
    assert seen == [(method, (), given)]
    assert changes.have_changed is changed


def test_a_way_to_the_workers_that_is_not_there_is_refused() -> None:
    for way in ("uniproc", "multiproc"):
        with pytest.raises(SettingsRefused, match=r"in vLLM 0\.32 alone"):
            watch_entries({f"vllm.v1.executor.{way}_executor": ModuleType(way)}, WeightChanges())


def test_a_change_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    changes = WeightChanges()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            changes.note("reload_weights")
    (record,) = caplog.records
    assert "changed or may have (reload_weights)" in record.getMessage()
    assert "until it is restarted" in record.getMessage()
    with caplog.at_level(logging.ERROR):
        elsewhere = WeightChanges()
        elsewhere.learn()
    assert elsewhere.have_changed
    assert len(caplog.records) == 1, "the worker has said it"
