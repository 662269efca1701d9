"""CONFIGURATION.md, made from the configuration's own fields: `make docs` writes it."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gateway.config import GatewayConfig
from nodeagent.config import AgentConfig
from warmroute.configuration import PREFIX, fields
from warmroute.directory_command import DirectoryCommandConfig
from warmroute.forget_command import ForgetCommandConfig

_INTRODUCTION = """# Configuration

One YAML or TOML file per process (`--config FILE`), `WARMROUTE_*` variables above it, flags above both. A variable
names a field by its path, joined with two underscores: `WARMROUTE_LISTEN__PORT=8080`; lists are JSON. An unknown key
is an error that names the nearest known one. `--check` prints what is in force, without secrets.

This page is made by `make docs` from the fields themselves.
"""
PARTS: dict[str, type[BaseModel]] = {
    "warmroute gateway": GatewayConfig,
    "warmroute agent": AgentConfig,
    "warmroute directory": DirectoryCommandConfig,
    "warmroute forget": ForgetCommandConfig,
}


def page() -> str:
    """The page's text."""
    return "\n".join([_INTRODUCTION, *(line for part, kind in PARTS.items() for line in _part(part, kind))])


def _part(part: str, kind: type[BaseModel]) -> Iterator[str]:
    yield f"## `{part}`\n"
    yield "| field | default | meaning |"
    yield "|---|---|---|"
    for name, field in fields(kind):
        if field.description:
            yield f"| `{name}` | {_default(field)} | {field.description} |"
    example = next(name for name, field in fields(kind) if "." in name and field.description)
    yield f"\nAs a variable, `{example}` is `{PREFIX}{example.upper().replace('.', '__')}`.\n"


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if field.default_factory is not None:
        return "by the environment"
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value in (None, (), {}):
        return "none"
    return f"`{value}`"


if __name__ == "__main__":
    print(page(), end="")
