"""What a node agent is told at its start. Chunk sizes, models and identities are not here: engines tell them.

Strict: an unknown key is an error. Every field says its unit; relations between fields are checked here. Where a value
comes from (file, `WARMROUTE_*` variables, flags) is none of this module's business.
"""

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, field_validator, model_validator

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.redis_schema import KEY_PREFIX, KEY_PREFIX_PATTERN
from directory.server_url import URL_FORMS
from nodeagent.hints import read_address
from nodeagent.publisher import WALK_INTERVAL_S
from nodeagent.tiers.arena_memory import ArenaWish, HugePages
from nodeagent.tiers.drive import READ_THREADS
from nodeagent.tiers.drives import DRIVES_MAX
from nodeagent.tiers.file_store import FsyncPolicy
from nodeagent.tiers.machine_memory import MachineMemory
from nodeagent.tiers.write_policy import PINS_MAX

GB = 1e9
TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 32, 512
_TOKEN = f"[A-Za-z0-9+/=_.-]{{{TOKEN_CHARS_MIN},{TOKEN_CHARS_MAX}}}"

DirectoryKeyHex = Annotated[str, StringConstraints(pattern=f"^[0-9a-fA-F]{{{2 * DIRECTORY_KEY_BYTES}}}$")]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AgentListenConfig(Section):
    """The agent's HTTP: health, metrics, tokenizer files, prefetch hints."""

    bind: str = Field(
        "127.0.0.1", min_length=1, description="Address of the HTTP; only this machine reaches the default."
    )
    port: int = Field(0, ge=0, le=65535, description="Port of the HTTP; 0 takes a free one.")
    url: str | None = Field(
        None, description="Where gateways reach the HTTP, such as http://10.0.0.5:8300; bind and port if left out."
    )
    admin_token: SecretStr | None = Field(
        None,
        min_length=16,
        description="If given, POST /forget, /pins and reset_prefix_cache need `Authorization: Bearer` and this.",
    )

    @field_validator("url")
    @classmethod
    def _is_base_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        scheme, _, rest = url.rstrip("/").partition("://")
        if scheme not in ("http", "https") or not rest or "?" in rest or "@" in rest:
            raise ValueError("must be http://host:port or https://host:port")
        return url.rstrip("/")


class AgentDirectoryConfig(Section):
    """The fleet's directory."""

    url: SecretStr = Field(SecretStr("redis://127.0.0.1:6379"), description=URL_FORMS)
    key_prefix: str = Field(
        KEY_PREFIX,
        pattern=KEY_PREFIX_PATTERN,
        description="Begins every key of this fleet: letters, digits, -, _ and .; the same for all parts of a fleet.",
    )
    walk_interval_s: float = Field(
        WALK_INTERVAL_S, gt=0, allow_inf_nan=False, description="Seconds after which everything is announced anew."
    )


class DramConfig(Section):
    """The DRAM tier."""

    gb: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="Quota of the DRAM tier in GB (10^9 bytes), for all engines of the host together.",
    )
    share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="The quota as a share of this machine's memory, or of its control group's where that has less; "
        "instead of gb.",
    )
    huge_pages: HugePages = Field(
        "auto",
        description="Pages of 2 MiB: auto, from the kernel's pool where that has enough of them free, or else "
        "transparent ones where the kernel gives them to shared memory, or else 4 KiB; on, no tier without; off.",
    )
    numa_node: int | None = Field(
        None, ge=0, le=1_023, description="The NUMA node from which all its memory comes; any if left out."
    )
    verify_reads: bool = Field(
        True,
        description="Whether engines check the checksum of every chunk after they copied it; false trusts memory, and "
        "every engine of the host, with what is stored.",
    )

    @field_validator("huge_pages", mode="before")
    @classmethod
    def _as_written(cls, value: object) -> object:
        """YAML reads a bare on and off as truths."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if self.share is not None and "gb" in self.model_fields_set:
            raise ValueError("gb and share can't both be given: one is the quota")
        return self

    @property
    def quota_bytes(self) -> int:
        """The quota in bytes. A share is one of what the machine has now: ask once."""
        return round(self.gb * GB) if self.share is None else int(self.share * MachineMemory().total_bytes())

    @property
    def wish(self) -> ArenaWish:
        """The kind of memory that is wanted."""
        return ArenaWish(self.huge_pages, self.numa_node)

    def in_force(self) -> dict[str, Any]:
        """What a share comes to."""
        return {} if self.share is None else {"gb": self.quota_bytes / GB}


class RatedConfig(Section):
    """What a drive's maker says it may be written."""

    capacity_gb: float | None = Field(
        None, gt=0, le=1e6, description="The drive's rated capacity in GB (10^9 bytes), for its endurance budget."
    )
    dwpd: float | None = Field(
        None,
        gt=0,
        le=1e3,
        description="Its rated drive writes per day: capacity_gb x dwpd bounds the writes of 24 hours; none: no limit.",
    )

    @model_validator(mode="after")
    def _has_a_whole_rating(self) -> Self:
        if (self.capacity_gb is None) != (self.dwpd is None):
            raise ValueError("capacity_gb and dwpd must be given together: their product is the daily budget")
        return self

    @property
    def day_bytes(self) -> int | None:
        """The drive's endurance budget in bytes a day; `None` for no limit."""
        if self.capacity_gb is None or self.dwpd is None:
            return None
        return round(self.capacity_gb * self.dwpd * GB)


class DriveConfig(RatedConfig):
    """One drive of the NVMe tier."""

    path: Path = Field(description="A folder of the agent's own on this drive.")
    gb: float = Field(gt=0, le=1e6, description="Quota of the folder in GB (10^9 bytes), with what was there before.")

    @field_validator("path", mode="before")
    @classmethod
    def _is_not_empty(cls, path: object) -> object:
        if path == "":
            raise ValueError("must be a folder")
        return path

    @property
    def quota_bytes(self) -> int:
        """The quota in bytes."""
        return round(self.gb * GB)


class NvmeConfig(RatedConfig):
    """The NVMe tier: off unless it has a path, or paths."""

    path: Path | None = Field(None, description="A folder of the agent's own; none: no such tier.")
    gb: float | None = Field(
        None, gt=0, le=1e6, description="Quota of the folder in GB (10^9 bytes), with what was there before."
    )
    paths: tuple[DriveConfig, ...] = Field(
        (), max_length=DRIVES_MAX, description="Several drives, instead of path and gb: chunks are spread by key."
    )
    min_free_gb: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="GB that stay free on each file system, whoever fills it; a twentieth of it if left out.",
    )
    read_threads: int = Field(READ_THREADS, ge=1, le=64, description="Reads of one drive that go on side by side.")
    write: Literal["reuse", "hit", "through", "demote"] = Field(
        "reuse",
        description="When a chunk is written: reuse, once hit in DRAM or stored again; hit, once hit in DRAM; "
        "through, at once; demote, before DRAM evicts it.",
    )
    pinned: tuple[DirectoryKeyHex, ...] = Field(
        (),
        max_length=PINS_MAX,
        description="Directory keys in hex; their chunks and all that follow them are written whatever `write` says.",
    )
    fsync: FsyncPolicy = Field(
        "none",
        description="What a write waits for the drive to keep: none; data: the file's bytes; data+dir: its name too.",
    )

    @field_validator("path", mode="before")
    @classmethod
    def _is_not_empty(cls, path: object) -> object:
        if path == "":
            raise ValueError("must be a folder; leave it out for no NVMe tier")
        return path

    @model_validator(mode="after")
    def _has_a_quota(self) -> Self:
        if self.path is not None and self.gb is None:
            raise ValueError("gb must be given with path: a tier on disk has a quota")
        if self.path is None and self.gb is not None:
            raise ValueError("path must be given with gb: a quota needs a folder")
        if self.path is not None and self.paths:
            raise ValueError("give either path and gb, or paths")
        if self.path is None and self.dwpd is not None:
            raise ValueError("path must be given with dwpd; each of several paths has its own capacity_gb and dwpd")
        folders = [os.path.realpath(drive.path) for drive in self.paths]
        twice = next((folder for folder in folders if folders.count(folder) > 1), None)
        if twice is not None:
            raise ValueError(f"paths names the folder {twice} twice; each drive has its own")
        return self

    @property
    def drives(self) -> tuple[DriveConfig, ...]:
        """One or several drives; none without the tier."""
        if self.path is not None and self.gb is not None:
            return (DriveConfig(path=self.path, gb=self.gb, capacity_gb=self.capacity_gb, dwpd=self.dwpd),)
        return self.paths

    @property
    def quota_bytes(self) -> int:
        """The quotas of all drives in bytes; 0 without the tier."""
        return sum(drive.quota_bytes for drive in self.drives)

    @property
    def min_free_bytes(self) -> int | None:
        """What must stay free, in bytes; `None` for a share."""
        return None if self.min_free_gb is None else round(self.min_free_gb * GB)


class ForgetConfig(Section):
    """What is forgotten on request."""

    term_s: float = Field(
        3600.0,
        ge=60,
        le=30 * 86_400,
        description="Seconds for which what was forgotten isn't let in again: longer than engines' GPUs hold it.",
    )


class PeerListenConfig(Section):
    """Where other hosts' agents fetch this host's chunks."""

    bind: str = Field(
        "127.0.0.1", min_length=1, description="Address at which peers fetch; only this machine reaches the default."
    )
    port: int | None = Field(
        None, ge=0, le=65535, description="Port at which peers fetch; 0 takes a free one; none: they can't."
    )
    address: str | None = Field(None, description="host:port at which other hosts reach it; bind and port if left out.")

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str | None) -> str | None:
        return None if address is None else str(read_address(address))

    @model_validator(mode="after")
    def _is_reachable(self) -> Self:
        if self.port is not None and self.address is None and self.bind in ("0.0.0.0", "::"):
            raise ValueError(f"address must be given with bind {self.bind}: other hosts can't connect to that")
        if self.port is None and self.address is not None:
            raise ValueError("port must be given with address: nothing listens without it")
        return self


class PeerTlsConfig(Section):
    """TLS between agents."""

    cert: Path | None = Field(None, description="Certificate (PEM) that this agent shows to those who fetch.")
    key: Path | None = Field(None, description="The certificate's key (PEM).")
    ca: Path | None = Field(None, description="Who signs peers' certificates (PEM); with it, peers are asked by TLS.")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key must be given together")
        if self.cert is not None and self.ca is None:
            raise ValueError("ca must be given with cert: peers have certificates, too")
        return self


class PeersConfig(Section):
    """Chunks from other hosts' agents, and for them."""

    listen: PeerListenConfig = PeerListenConfig()
    token: SecretStr | None = Field(
        None,
        description="The fleet's secret, the same on all hosts: "
        f"{TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} random letters, digits or any of + / = _ . -",
    )
    fetch: Literal["auto", "off"] | None = Field(
        None,
        description="auto: follow a gateway's hint where that beats computing; off. auto with a token, else off.",
    )
    tls: PeerTlsConfig = PeerTlsConfig()

    @field_validator("token", mode="before")
    @classmethod
    def _is_secret(cls, token: object) -> object:
        text = token.get_secret_value() if isinstance(token, SecretStr) else token
        if text is not None and not (isinstance(text, str) and re.fullmatch(_TOKEN, text)):
            raise ValueError(
                f"a token is a text of {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} letters, digits or + / = _ . -, "
                "such as `openssl rand -hex 32` prints"
            )
        return token

    @model_validator(mode="after")
    def _has_a_token(self) -> Self:
        if self.token is None and self.listen.port is not None:
            raise ValueError("token must be given with listen.port: nobody else may have this host's chunks")
        if self.token is None and self.fetch == "auto":
            raise ValueError("token must be given with fetch auto: peers ask for it")
        if self.listen.port is not None and self.tls.ca is not None and self.tls.cert is None:
            raise ValueError("tls.cert and tls.key must be given with tls.ca where listen.port is")
        return self

    @property
    def may_fetch(self) -> bool:
        """Whether hints are followed."""
        return self.token is not None and self.fetch != "off"

    def in_force(self) -> dict[str, Any]:
        """Fields whose value in force follows from others, where they were left out."""
        return {"fetch": "auto" if self.may_fetch else "off"}


class AgentConfig(Section):
    """One agent."""

    host: str = Field(
        default_factory=socket.gethostname, min_length=1, description="This machine's name in the directory."
    )
    door: str = Field(
        "/run/warmroute/agent.sock", min_length=1, description="Path of the Unix socket at which engines connect."
    )
    listen: AgentListenConfig = AgentListenConfig()
    directory: AgentDirectoryConfig = AgentDirectoryConfig()
    dram: DramConfig = DramConfig()
    nvme: NvmeConfig = NvmeConfig()
    forget: ForgetConfig = ForgetConfig()
    peers: PeersConfig = PeersConfig()
    state_folder: Path | None = Field(
        None, description="Folder for what is known of engines' GPUs across restarts; the door's path and .state."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug to error.")

    @property
    def state(self) -> Path:
        """The state folder in force."""
        return self.state_folder or Path(f"{self.door}.state")

    def in_force(self) -> dict[str, Any]:
        """Fields whose value in force follows from others, where they were left out."""
        return {"state_folder": self.state}
