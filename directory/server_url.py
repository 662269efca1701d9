"""ServerUrl: where the directory's servers are and how to log in there, read from one URL.

    redis://[user:password@]host[:6379][/db]                                     one server; rediss:// with TLS
    unix://[user:password@]/run/redis.sock[?db=0]                                one server on this machine
    redis-sentinel://[user:password@]host[:26379],host,host/MASTER[/db]          a master that sentinels know
    redis-cluster://[user:password@]host[:6379],host,host                        a cluster; rediss-...:// with TLS

What stands before the @ is percent-encoded where it isn't a letter or a digit. Options: `ssl_ca_certs`, `ssl_certfile`,
`ssl_keyfile`, `ssl_cert_reqs`, `ssl_check_hostname`, `db`, and the sentinels' own `sentinel_username`,
`sentinel_password`.
"""

import os
import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, quote, urlencode

from directory.errors import DirectoryError

URL_FORMS = (
    "redis://[user:password@]host:port, unix://[user:password@]/path, "
    "redis-sentinel://[user:password@]host:port,host:port/MASTER or "
    "redis-cluster://[user:password@]host:port,host:port; with TLS rediss://, rediss-sentinel:// or rediss-cluster://."
)
"""The same in a sentence, for whoever configures a part of the fleet."""

HOSTS_MAX = 64
PORT, SENTINEL_PORT = 6379, 26379
PORT_MAX = 65535

Kind = Literal["single", "sentinel", "cluster"]

_SCHEMES: dict[str, tuple[Kind, str]] = {
    "redis": ("single", "redis"),
    "rediss": ("single", "rediss"),
    "unix": ("single", "unix"),
    "redis-sentinel": ("sentinel", "redis"),
    "rediss-sentinel": ("sentinel", "rediss"),
    "redis-cluster": ("cluster", "redis"),
    "rediss-cluster": ("cluster", "rediss"),
}
TLS_OPTIONS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_CHOICES = {
    "ssl_cert_reqs": ("required", "optional", "none"),
    "ssl_check_hostname": ("true", "false", "yes", "no", "1", "0"),
}
_SENTINEL_OPTIONS = {"sentinel_username", "sentinel_password"}
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\[\]:/?#@,\s]+))(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Address:
    """One server: a host and its port, or a socket's path and 0."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else self.host


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """A directory's URL, read. `seeds`: the server, the sentinels, or the members of the cluster to begin with."""

    kind: Kind
    seeds: tuple[Address, ...]
    master_name: str
    _scheme: str
    _login: str = field(repr=False)
    _database: str
    _tls: tuple[tuple[str, str], ...] = field(repr=False)
    _sentinel_login: str = field(repr=False)

    @property
    def tls_options(self) -> tuple[tuple[str, str], ...]:
        """Names and values, as given."""
        return self._tls

    def of_server(self, address: Address) -> str:
        """The URL of one server that holds the directory, as redis-py reads it.

        Raises `DirectoryError` for what can't be a host's name, such as the `?` of a server that doesn't know its own.
        """
        if self._scheme != "unix" and not (_HOST.fullmatch(str(address)) and 0 < address.port <= PORT_MAX):
            raise DirectoryError(f"the servers name one that can't be reached: {address}")
        return self._url(address, self._login, self._database)

    def of_sentinel(self, address: Address) -> str:
        """The URL of one sentinel."""
        return self._url(address, self._sentinel_login, "")

    def _url(self, address: Address, login: str, database: str) -> str:
        options = dict(self._tls)
        if self._scheme == "unix":
            place = address.host
            options |= {"db": database} if database else {}
        else:
            place = f"{address}/{database}"
        return f"{self._scheme}://{login}{place}" + (f"?{urlencode(options)}" if options else "")


def parse_server_url(url: str) -> ServerUrl:
    """The URL's parts. Raises `DirectoryError`: one sentence that doesn't repeat the URL, as it may hold a password."""
    try:
        return _parse(url)
    except _Fault as fault:
        raise DirectoryError(f"the directory's URL {fault}") from None


def check_server_url(url: str) -> ServerUrl:
    """As `parse_server_url`, and every file that the URL names can be read now."""
    parsed = parse_server_url(url)
    for name, path in parsed.tls_options:
        if name in _TLS_FILES and not (os.path.isfile(path) and os.access(path, os.R_OK)):
            raise DirectoryError(f"the directory's URL names a file that can't be read: {name}={path}")
    return parsed


class _Fault(Exception):
    """What is wrong with a URL, as the end of a sentence."""


def _parse(url: str) -> ServerUrl:
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in _SCHEMES:
        raise _Fault(f"must begin with {', '.join(f'{name}://' for name in _SCHEMES)}")
    kind, plain_scheme = _SCHEMES[scheme]
    rest, _, query = rest.partition("?")
    netloc, _, path = rest.partition("/")
    if "#" in url or "@" in path or "@" in query:
        raise _Fault("has a # or a late @: write @ / ? # in names and passwords as %40 %2F %3F %23")
    login, at, hosts = netloc.rpartition("@")
    options = _options(query, kind)
    _check_tls(options, scheme)
    seeds: tuple[Address, ...]
    if plain_scheme == "unix":
        if hosts or not path.strip("/"):
            raise _Fault("must name a socket, as in unix:///run/redis.sock")
        seeds, master_name, database = (Address(f"/{path}", 0),), "", ""
    else:
        seeds = _seeds(hosts, kind)
        master_name, database = _place(path.strip("/"), kind)
    return ServerUrl(
        kind,
        seeds,
        master_name,
        plain_scheme,
        login + at,
        options.get("db", database),
        tuple((name, value) for name, value in options.items() if name in TLS_OPTIONS),
        _login_of(options.get("sentinel_username", ""), options.get("sentinel_password", "")),
    )


def _options(query: str, kind: Kind) -> dict[str, str]:
    known = TLS_OPTIONS | (_SENTINEL_OPTIONS if kind == "sentinel" else set())
    known |= {"db"} if kind != "cluster" else set()
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - known)
    if unknown:
        raise _Fault(f"has an unknown option {unknown[0]!r}; known are {', '.join(sorted(known))}")
    if not options.get("db", "0").isdigit():
        raise _Fault("has a db that isn't a number")
    return options


def _check_tls(options: dict[str, str], scheme: str) -> None:
    for name in sorted(TLS_OPTIONS & set(options)):
        if not scheme.startswith("rediss"):
            raise _Fault(
                f"has the option {name!r}, which needs TLS: rediss://, rediss-sentinel:// or rediss-cluster://"
            )
        choices = _TLS_CHOICES.get(name)
        if choices and options[name].lower() not in choices:
            raise _Fault(f"has {name}={options[name]!r}: it must be one of {', '.join(choices)}")


def _seeds(hosts: str, kind: Kind) -> tuple[Address, ...]:
    default_port = SENTINEL_PORT if kind == "sentinel" else PORT
    texts = hosts.split(",")
    if len(texts) > (1 if kind == "single" else HOSTS_MAX):
        raise _Fault(
            "names several hosts: then it begins with redis-cluster:// or redis-sentinel://, and has 64 at most"
        )
    seeds = []
    for text in texts:
        if not text or text.startswith(":"):
            raise _Fault("must name a host, as in redis://host:6379")
        found = _HOST.fullmatch(text)
        port = int(found[3] or default_port) if found else 0
        if not found or port > PORT_MAX:
            raise _Fault("has a host or port that can't be read")
        if port == 0:
            raise _Fault("must name a host, as in redis://host:6379")
        seeds.append(Address(found[1] or found[2], port))
    return tuple(seeds)


def _place(path: str, kind: Kind) -> tuple[str, str]:
    """The master's name and the database that a path holds."""
    if kind == "cluster":
        if path not in ("", "0"):
            raise _Fault("names a database: a cluster has only one")
        return "", ""
    master_name, _, database = path.partition("/") if kind == "sentinel" else ("", "", path)
    if kind == "sentinel" and not master_name:
        raise _Fault("must name the master, as in redis-sentinel://host1,host2,host3/mymaster")
    if database and not database.isdigit():
        raise _Fault("may name a database by its number only, as in redis://host:6379/0")
    return master_name, database


def _login_of(user: str, password: str) -> str:
    return f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
