"""The users that `directory/README.md` tells operators to make."""

from pathlib import Path

from directory import redis_schema as schema

SENTINEL_USER = "seeker"


def documented_users() -> dict[str, list[str]]:
    """The users of the directory's servers by name, as the words of a command; their password is `pw`."""
    return {name: rule for name, rule in _all_users().items() if name != SENTINEL_USER}


def documented_sentinel_user() -> list[str]:
    """The same of the sentinels' one."""
    return _all_users()[SENTINEL_USER]


def _all_users() -> dict[str, list[str]]:
    readme = Path(schema.__file__).with_name("README.md").read_text()
    rules = [line.replace("<password>", "pw").split() for line in readme.splitlines() if line.startswith("ACL SETUSER")]
    return {rule[2]: rule for rule in rules}
