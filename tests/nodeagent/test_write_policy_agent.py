"""Write policies, pins and the endurance budget through the door and the agent's HTTP."""

import json
import logging
import urllib.error
import urllib.request

import pytest
from pydantic import ValidationError

from nodeagent.client import PutResult
from nodeagent.config import GB, AgentConfig
from nodeagent.tiers.budgeted_store import STATE_NAME, HostTime
from nodeagent.tiers.chunk_file import HEADER_BYTES, file_bytes, name_of
from nodeagent.tiers.endurance import DailyBudget, Instant
from tests.nodeagent.running import (
    CHUNK_BYTES,
    SLOTS,
    WAIT_S,
    connected,
    eventually,
    label,
    payload,
    read,
    running_agent,
    storage_key,
)

FILE_BYTES = file_bytes(CHUNK_BYTES)
BURST_FILES = 5
DAY_BYTES = 8 * (BURST_FILES * FILE_BYTES + HEADER_BYTES)
DAY_S = 86_400.0
REFUSED = "warmroute_admission_refused_total"


def nvme(folder, write, **more):
    return {
        "nvme_path": str(folder / "nvme"),
        "nvme_bytes": 1_000 * FILE_BYTES,
        "nvme_write": write,
        "nvme_more": more,
    }


def is_on_disk(folder, name):
    text = name_of(storage_key(name)).hex()
    return (folder / "nvme" / text[:2] / text[2:4] / text).exists()


def nvme_status(agent):
    return agent.status()["tiers"]["nvme"]


def is_idle(agent):
    """Whether nothing waits to be written, or is being written."""
    nvme, hierarchy = agent._nvme, agent._tier.hierarchy
    return nvme is None or not (nvme.queued_writes or hierarchy._held_entries)


def put(agent, client, name, parent=None, position=0):
    assert client.put(label(name, parent, position), payload(name), WAIT_S) is PutResult.STORED
    eventually(lambda: agent.on_loop(lambda: is_idle(agent.agent)), "the end of the writes")


def call(agent, method, path, keys):
    url = next(iter(agent.call(agent.directory.members()))).registration.agent_url
    body = json.dumps({"keys": [key.hex() for key in keys]}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}{path}", body, method=method), timeout=WAIT_S) as answer:
        return json.loads(answer.read())


def fill_bucket(folder):
    """As after a day on which nothing was written."""
    now = HostTime()()
    (folder / "nvme").mkdir(mode=0o700)
    before = Instant(now.boot_id, now.boot_s - DAY_S, now.wall_s - DAY_S)
    (folder / "nvme" / STATE_NAME).write_bytes(DailyBudget(DAY_BYTES, before).state(now))


def test_with_demote_what_dram_evicts_is_read_from_disk_and_what_it_holds_is_not_there(tmp_path):
    names = [f"n{number}" for number in range(3 * SLOTS)]
    with running_agent(tmp_path, **nvme(tmp_path, "demote")) as agent, connected(agent.config.door) as client:
        for name in names:
            put(agent, client, name)
        assert not is_on_disk(tmp_path, names[-1])
        eventually(lambda: nvme_status(agent)["chunks"] >= 2 * SLOTS, "the chunks that were evicted")
        assert [read(client, name) for name in names] == [payload(name) for name in names]
        assert nvme_status(agent)["write"] == "demote"


def test_pins_of_the_configuration_and_by_call_write_their_prefixes_at_once(tmp_path):
    pinned = {"pinned": [storage_key("system")[:16].hex()]}
    with running_agent(tmp_path, **nvme(tmp_path, "hit", **pinned)) as agent, connected(agent.config.door) as client:
        put(agent, client, "system")
        put(agent, client, "turn", "system", 1)
        put(agent, client, "other")
        eventually(lambda: is_on_disk(tmp_path, "turn"), "the file")
        assert is_on_disk(tmp_path, "system")
        assert not is_on_disk(tmp_path, "other")
        assert call(agent, "POST", "/pins", [storage_key("another")[:16]]) == {"pinned": 2}
        put(agent, client, "another")
        eventually(lambda: is_on_disk(tmp_path, "another"), "the file")
        assert call(agent, "DELETE", "/pins", [storage_key(name)[:16] for name in ("another", "system")]) == {
            "pinned": 0
        }
        put(agent, client, "next", "another", 1)
        assert not is_on_disk(tmp_path, "next")
        assert nvme_status(agent)["pinned_keys"] == 0


def test_a_host_without_nvme_has_nothing_to_pin_to(tmp_path):
    with running_agent(tmp_path) as agent, connected(agent.config.door):
        with pytest.raises(urllib.error.HTTPError) as caught:
            call(agent, "POST", "/pins", [b"k" * 16])
        assert (caught.value.code, b"no nvme tier" in caught.value.read()) == (409, True)


def test_a_spent_budget_is_counted_and_shown_and_holds_after_a_restart(tmp_path, caplog):
    fill_bucket(tmp_path)
    options = nvme(tmp_path, "through", capacity_gb=DAY_BYTES / GB, dwpd=1.0)
    drive = str(tmp_path / "nvme")
    with running_agent(tmp_path, **options) as agent, connected(agent.config.door) as client:
        assert agent.metric("warmroute_nvme_write_budget_bytes", drive=drive) == BURST_FILES * FILE_BYTES
        assert agent.metric("warmroute_nvme_write_budget_day_bytes", drive=drive) == DAY_BYTES
        for number in range(BURST_FILES + 2):
            put(agent, client, f"n{number}")
        eventually(lambda: nvme_status(agent)["chunks"] == BURST_FILES, "the files")
        assert agent.metric(REFUSED, reason="endurance") == 2
        assert agent.metric("warmroute_nvme_write_budget_bytes", drive=drive) < FILE_BYTES
        assert agent.metric("warmroute_nvme_written_today_bytes", drive=drive) == BURST_FILES * FILE_BYTES
        assert [read(client, f"n{number}") for number in range(7)] == [payload(f"n{number}") for number in range(7)]
        (budget,) = nvme_status(agent)["write_budgets"]
        assert (budget["drive"], budget["bytes_per_day"]) == (drive, DAY_BYTES)
    told = [record for record in caplog.records if "read only until" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING], "said once"
    with running_agent(tmp_path, **options) as agent, connected(agent.config.door) as client:
        eventually(lambda: nvme_status(agent)["chunks"] == BURST_FILES, "the index")
        put(agent, client, "after")
        assert agent.metric(REFUSED, reason="endurance") == 1
        assert not is_on_disk(tmp_path, "after")
        assert read(client, "n0") == payload("n0")


def test_without_a_rating_writes_are_not_limited_and_the_start_says_so(tmp_path, caplog):
    with caplog.at_level(logging.INFO), running_agent(tmp_path, **nvme(tmp_path, "through")) as agent:
        assert nvme_status(agent)["write_budgets"] == []
    assert any("no endurance budget" in record.message for record in caplog.records)
    assert not (tmp_path / "nvme" / STATE_NAME).exists()


@pytest.mark.parametrize(
    ("nvme", "says"),
    [
        ({"path": "x", "gb": 1, "dwpd": 1}, "capacity_gb and dwpd must be given together"),
        ({"path": "x", "gb": 1, "capacity_gb": 1_000}, "capacity_gb and dwpd must be given together"),
        ({"capacity_gb": 1_000, "dwpd": 1}, "path must be given with dwpd"),
        ({"paths": [{"path": "x", "gb": 1}], "capacity_gb": 1_000, "dwpd": 1}, "each of several paths has its own"),
        ({"paths": [{"path": "x", "gb": 1, "dwpd": 1}]}, "capacity_gb and dwpd must be given together"),
        ({"path": "x", "gb": 1, "pinned": ["abc"]}, "pinned"),
        ({"path": "x", "gb": 1, "pinned": ["zz" * 16]}, "pinned"),
    ],
    ids=["no capacity", "no dwpd", "no drive", "one for several", "half of one", "short key", "no hex"],
)
def test_a_rating_or_pin_that_makes_no_sense_is_refused(nvme, says):
    with pytest.raises(ValidationError, match=says):
        AgentConfig.model_validate({"nvme": nvme})


def test_each_of_several_drives_has_a_budget_of_its_own(tmp_path):
    (tmp_path / "rated").mkdir()
    fill_bucket(tmp_path / "rated")
    rated = {"path": str(tmp_path / "rated" / "nvme"), "gb": 1, "capacity_gb": DAY_BYTES / GB, "dwpd": 1.0}
    unrated = {"path": str(tmp_path / "unrated"), "gb": 1}
    options = {"nvme_paths": [rated, unrated]}
    with running_agent(tmp_path, nvme_write="through", **options) as agent, connected(agent.config.door) as client:
        for number in range(8 * BURST_FILES):
            put(agent, client, f"n{number}")
        refused = agent.metric(REFUSED, reason="endurance")
        assert refused > 0
        chunks = {drive["drive"]: drive["chunks"] for drive in nvme_status(agent)["drives"]}
        assert chunks[rated["path"]] == BURST_FILES
        assert sum(chunks.values()) == 8 * BURST_FILES - refused
        assert [each["drive"] for each in nvme_status(agent)["write_budgets"]] == [rated["path"]]
