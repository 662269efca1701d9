"""What `--check` and the start say of this machine: each lack once, by its field, and nothing is made or taken."""

import os

import pytest

from nodeagent.config import AgentConfig
from nodeagent.shortfalls import shortfalls, shortfalls_of_memory, space_at
from nodeagent.tiers.file_store import Space
from nodeagent.tiers.machine_memory import HugePool, MachineMemory
from warmroute.cli import main

GB = 1_000_000_000
TOKEN = "0123456789abcdef" * 4


class Machine(MachineMemory):
    """Sixteen GB, of which eight are free, no huge pages but `pool_gb`, and node 0 alone."""

    def __init__(self, pool_gb=0):
        super().__init__("/nowhere")
        self._pool_bytes = pool_gb * GB

    def total_bytes(self):
        return 16 * GB

    def available_bytes(self):
        return 8 * GB

    def huge_pool(self, node=None):
        return HugePool(self._pool_bytes, self._pool_bytes)


def config_of(tmp_path, **sections):
    return AgentConfig.model_validate({"door": str(tmp_path / "door.sock"), **sections})


def small(folder):
    """One file system of 10 GB, of which four are free."""
    return 1, Space(4 * GB, 10 * GB)


def told(config, space_of=small):
    return [each.text for each in shortfalls(config, Machine(), space_of)]


@pytest.mark.parametrize(
    ("dram", "says", "is_passing"),
    [
        ({"gb": 20}, "this machine has 8,000,000,000 bytes available", False),
        ({"gb": 12}, "an agent that runs here holds its own", True),
        ({"gb": 4, "numa_node": 7}, "dram.numa_node: this machine has no memory on node 7; there is 0", False),
        ({"gb": 4, "huge_pages": "on"}, "raise vm.nr_hugepages to 1,907, or set dram.huge_pages to auto", False),
    ],
)
def test_memory_that_can_not_be_had_is_told_before_an_engine_comes(tmp_path, dram, says, is_passing):
    (lack,) = shortfalls_of_memory(config_of(tmp_path, dram=dram), Machine())
    assert says in lack.text
    assert lack.is_passing is is_passing


@pytest.mark.parametrize("huge_pages", ["auto", "on"])
def test_huge_pages_that_are_there_are_enough(tmp_path, huge_pages):
    config = config_of(tmp_path, dram={"gb": 10, "huge_pages": huge_pages})
    assert shortfalls_of_memory(config, Machine(pool_gb=11)) == []
    assert shortfalls_of_memory(config, Machine(pool_gb=9)) != []


def test_a_machine_that_has_everything_lacks_nothing(tmp_path):
    (tmp_path / "b").mkdir(mode=0o700)
    paths = [{"path": str(tmp_path / "a"), "gb": 4}, {"path": str(tmp_path / "b"), "gb": 4}]
    assert told(config_of(tmp_path, dram={"gb": 4}, nvme={"paths": paths})) == []
    assert sorted(os.listdir(tmp_path)) == ["b"], "nothing is made"


def test_quotas_on_one_file_system_are_added_up(tmp_path):
    paths = [{"path": str(tmp_path / name), "gb": 6} for name in ("a", "b")]
    (text,) = told(config_of(tmp_path, nvme={"paths": paths}))
    assert f"12,000,000,000 bytes at {tmp_path}/a, {tmp_path}/b together are more" in text
    devices = {str(tmp_path / "a"): 1, str(tmp_path / "b"): 2}
    for name in ("a", "b"):
        (tmp_path / name).mkdir(mode=0o700)
    apart = told(config_of(tmp_path, nvme={"paths": paths}), lambda folder: (devices[folder], Space(GB, 10 * GB)))
    assert apart == []


def test_a_file_system_that_is_full_already_is_told(tmp_path):
    config = config_of(tmp_path, nvme={"path": str(tmp_path / "a"), "gb": 1, "min_free_gb": 5})
    (lack,) = shortfalls(config, Machine(), small)
    assert "4,000,000,000 bytes of the file system are free, and 5,000,000,000 stay free" in lack.text
    assert lack.is_passing


def test_folders_that_can_not_be_used_are_told_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    names = ("file", "missing/below", "open", "sick")
    paths = [{"path": str(tmp_path / name), "gb": 1} for name in names]
    (tmp_path / "sick").mkdir(mode=0o700)

    def space_of(folder):
        if folder.endswith("sick"):
            raise OSError(5, "Input/output error")
        return small(folder)

    file, missing, loose, sick = told(config_of(tmp_path, nvme={"paths": paths}), space_of)
    assert file.endswith("/file is no folder")
    assert missing.endswith("/missing isn't there; mount the drive")
    assert "writable by nobody else" in loose
    assert loose.endswith("mode 777")
    assert sick.endswith("can't be looked at: Input/output error")


def test_a_door_without_a_folder_and_certificates_that_are_not_there_are_told(tmp_path):
    gone = str(tmp_path / "gone.pem")
    config = config_of(tmp_path, door=str(tmp_path / "run" / "door.sock"), peers={"token": TOKEN, "tls": {"ca": gone}})
    assert told(config) == [
        f"door: there is no folder {tmp_path}/run; create it, or name another place",
        f"peers.tls.ca: {gone} can't be read",
    ]


def test_a_real_folder_is_looked_at(tmp_path):
    device, space = space_at(str(tmp_path))
    assert device == os.stat(tmp_path).st_dev
    assert 0 <= space.free_bytes <= space.total_bytes


def test_check_tells_it_beside_the_configuration(tmp_path, capsys):
    assert main(["agent", "--check", "--door", str(tmp_path / "d.sock"), "--dram-gb", "900000"]) == 0
    shown = capsys.readouterr()
    assert "gb: 900000.0" in shown.out
    assert shown.err.startswith("warmroute agent: on this machine: a dram tier of 900,000,000,000,000 bytes is refused")
