"""Memory is what the kernel says, within the narrowest limit of the control groups above this process."""

import pytest

from nodeagent.tiers.machine_memory import HUGE_PAGE_BYTES, HugePool, MachineMemory

MIB = 1 << 20
MEMINFO = "MemTotal:       1048576 kB\nMemFree:         262144 kB\nMemAvailable:    524288 kB\n"
V2 = "31 23 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "36 31 0:33 {root} /sys/fs/cgroup/memory rw,nosuid shared:16 - cgroup cgroup rw,memory\n"
UNLIMITED = "9223372036854771712"


@pytest.fixture
def machine(tmp_path):
    def made(files: dict[str, str]) -> MachineMemory:
        for place, text in ({"/proc/meminfo": MEMINFO} | files).items():
            path = tmp_path / place.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return MachineMemory(str(tmp_path))

    return made


def v2(folder: str, limit: str, used: int, cached: int = 0, high: str = "max") -> dict[str, str]:
    place = f"/sys/fs/cgroup{folder}"
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.high": f"{high}\n",
        f"{place}/memory.current": f"{used}\n",
        f"{place}/memory.stat": f"anon 5\ninactive_file {cached // 2}\nactive_file {cached - cached // 2}\n",
    }


def v1(folder: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    place = f"/sys/fs/cgroup/memory{folder}"
    return {
        f"{place}/memory.limit_in_bytes": f"{limit}\n",
        f"{place}/memory.usage_in_bytes": f"{used}\n",
        f"{place}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}\ntotal_active_file 0\n",
    }


IN_V2 = {"/proc/self/cgroup": "0::/pod/engine\n", "/proc/self/mountinfo": V2}
IN_V1 = {"/proc/self/cgroup": "4:cpu,memory:/pod/engine\n0::/\n", "/proc/self/mountinfo": V1.format(root="/")}


@pytest.mark.parametrize(
    ("files", "total_mib", "available_mib"),
    [
        pytest.param({}, 1024, 512, id="no groups at all"),
        pytest.param(IN_V2, 1024, 512, id="no limits"),
        pytest.param(IN_V2 | v2("/pod/engine", f"{300 * MIB}", 100 * MIB), 300, 200, id="its own"),
        pytest.param(IN_V2 | v2("/pod/engine", f"{300 * MIB}", 100 * MIB, 60 * MIB), 300, 260, id="less cached files"),
        pytest.param(IN_V2 | v2("/pod/engine", "max", 9, high=f"{80 * MIB}"), 80, 79, id="a limit that throttles"),
        pytest.param(
            IN_V2 | v2("/pod/engine", "max", 1) | v2("/pod", f"{200 * MIB}", 150 * MIB), 200, 50, id="its parent's"
        ),
        pytest.param(IN_V2 | v2("/pod/engine", f"{5000 * MIB}", 0), 1024, 512, id="more than there is"),
        pytest.param(IN_V2 | v2("/pod/engine", f"{100 * MIB}", 130 * MIB), 100, -30, id="lowered below what is used"),
        pytest.param(IN_V1 | v1("/pod/engine", UNLIMITED, 7), 1024, 512, id="v1, unlimited"),
        pytest.param(IN_V1 | v1("/pod/engine", f"{300 * MIB}", 100 * MIB, 50 * MIB), 300, 250, id="v1, its own"),
        pytest.param(
            IN_V1 | v1("/pod/engine", UNLIMITED, 7) | v1("/pod", f"{90 * MIB}", MIB), 90, 89, id="v1, its parent's"
        ),
        pytest.param(
            {
                "/proc/self/cgroup": "4:memory:/kubepods/pod7/c1\n",
                "/proc/self/mountinfo": V1.format(root="/kubepods/pod7/c1"),
                **v1("", f"{64 * MIB}", 4 * MIB),
            },
            64,
            60,
            id="v1, a container that sees its own group as the root",
        ),
        pytest.param(
            {
                "/proc/self/cgroup": "0::/\n",
                "/proc/self/mountinfo": V2,
                **v2("", f"{70 * MIB}", 5 * MIB),
            },
            70,
            65,
            id="a container with a namespace of its own",
        ),
    ],
)
def test_memory_is_bounded_by_the_narrowest_group(machine, files, total_mib, available_mib):
    memory = machine(files)
    assert memory.total_bytes() // MIB == total_mib
    assert memory.available_bytes() // MIB == available_mib


def test_the_pool_of_huge_pages_is_what_is_free_and_not_promised(machine):
    pool = "hugepages/hugepages-2048kB"
    memory = machine(
        {
            f"/sys/kernel/mm/{pool}/nr_hugepages": "100\n",
            f"/sys/kernel/mm/{pool}/free_hugepages": "60\n",
            f"/sys/kernel/mm/{pool}/resv_hugepages": "10\n",
            f"/sys/devices/system/node/node1/{pool}/nr_hugepages": "30\n",
            f"/sys/devices/system/node/node1/{pool}/free_hugepages": "30\n",
        }
    )
    assert memory.huge_pool() == HugePool(100 * HUGE_PAGE_BYTES, 50 * HUGE_PAGE_BYTES)
    assert memory.huge_pool(1) == HugePool(30 * HUGE_PAGE_BYTES, 20 * HUGE_PAGE_BYTES)
    assert memory.huge_pool(0) == memory.huge_pool(), "a kernel without nodes has one pool"


def test_a_machine_without_huge_pages_has_none(machine):
    assert machine({}).huge_pool() == HugePool(0, 0)
    assert machine({}).transparent_setting() == "never"


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("always within_size advise [never] deny force\n", "never"),
        ("always within_size [advise] never deny force\n", "advise"),
    ],
)
def test_the_setting_of_transparent_pages_is_the_one_in_brackets(machine, text, setting):
    assert machine({"/sys/kernel/mm/transparent_hugepage/shmem_enabled": text}).transparent_setting() == setting


def test_nodes_are_those_with_memory_and_each_has_its_own(machine):
    node = "Node {n} MemTotal: 524288 kB\nNode {n} MemFree: 1024 kB\nNode {n} Active(file): 2048 kB\n"
    memory = machine(
        {
            "/sys/devices/system/node/has_memory": "0,2-3\n",
            "/sys/devices/system/node/node2/meminfo": node.format(n=2) + "Node 2 Inactive(file): 4096 kB\n",
        }
    )
    assert memory.nodes() == (0, 2, 3)
    assert memory.available_on(2) == 7 * MIB


def test_a_machine_that_knows_no_nodes_has_node_0_with_all_its_memory(machine):
    assert machine({}).nodes() == (0,)
    assert machine({}).available_on(0) == 512 * MIB


def test_this_machine_can_be_read():
    memory = MachineMemory()
    assert 0 < memory.available_bytes() <= memory.total_bytes()
    assert 0 in memory.nodes()
    assert 0 < memory.available_on(0) <= memory.total_bytes()
