"""Configuration of every part: one YAML or TOML file, `WARMROUTE_*` variables above it, flags above both.

A variable names a field by its path, joined with two underscores: `WARMROUTE_LISTEN__PORT=8080`. Lists are JSON. An
unknown key, in the file or in a variable, is an error that names the nearest known one.
"""

import difflib
import json
import logging
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args, get_origin, runtime_checkable

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from directory.server_url import TLS_OPTIONS

PREFIX = "WARMROUTE_"
_SERVICE_VARIABLE = re.compile(r"WARMROUTE_(.+_)?(SERVICE_(HOST|PORT)(_.+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_.+)?)")
MASK = "***"
FILE_CHARS_MAX = 1_000_000
SHOWN_CHARS_MAX = 40
"""A wrong value that is longer isn't repeated in the message."""
HARMLESS_OPTIONS, SECRET_OPTION = (*TLS_OPTIONS, "db", "sentinel_username"), "sentinel_password"
Config = TypeVar("Config", bound=BaseModel)


@runtime_checkable
class Derived(Protocol):
    """A section of which some values follow from others."""

    def in_force(self) -> dict[str, Any]:
        """Those values, by field."""
        ...


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that is written twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See the class."""
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} is written twice", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


class ConfigurationError(Exception):
    """The configuration can't be used; the message is a sentence for each thing that is wrong."""


def load(
    kind: type[Config],
    path: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, Any],
    others: Sequence[type[BaseModel]] = (),
) -> Config:
    """The configuration in force. `flags` maps dotted paths to values; `None` means not given.

    What only a part of `others` knows is passed over, in the file and the variables: its file will do for this part.
    """
    values = {} if path is None else _read(path)
    known = dict(fields(kind))
    foreign = {name for other in others for name, _ in fields(other)} - set(known)
    values = _without(values, foreign)
    for name, text in environment.items():
        if name.startswith(PREFIX) and not _is_of_a_service(name, text) and _dotted(name) not in foreign:
            field = _field_of(name, known)
            _set(values, field, _listed(field, text) if _is_list(known[field].annotation) else text)
    for dotted, value in flags.items():
        if value is not None:
            _set(values, dotted, value)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError("; ".join(_sentence(each, known) for each in error.errors())) from None


def set_up_logging(level: str) -> None:
    """Log to stderr, without what libraries say of each request and each start of a server."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for library in ("httpx", "uvicorn.error"):
        logging.getLogger(library).setLevel(logging.WARNING)


def fields(kind: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field with its dotted path, sections before their own fields."""
    for name, field in kind.model_fields.items():
        yield f"{above}{name}", field
        for section in _sections(field.annotation):
            yield from fields(section, f"{above}{name}.")


def effective(config: BaseModel) -> str:
    """The configuration as YAML, without secrets."""
    return str(yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > FILE_CHARS_MAX:
            raise ConfigurationError(f"{path} has more than {FILE_CHARS_MAX} characters: that is no configuration")
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} can't be read: {error}") from None
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigurationError(f"{path}{place}: {error.problem or 'not valid YAML'}") from None
    except RecursionError:
        raise ConfigurationError(f"{path} is nested too deep") from None
    except (tomllib.TOMLDecodeError, yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold keys and values, not {type(values).__name__}")
    return values


def _is_of_a_service(name: str, text: str) -> bool:
    """Whether Kubernetes set the variable: it makes some for every Service, and one may be called warmroute."""
    return bool(_SERVICE_VARIABLE.fullmatch(name)) or bool(
        re.fullmatch(rf"{PREFIX}(.+_)?PORT", name) and text.startswith(("tcp://", "udp://", "sctp://"))
    )


def _without(values: dict[str, Any], foreign: set[str], above: str = "") -> dict[str, Any]:
    """`values` without the fields whose dotted paths are `foreign`."""
    kept = {name: value for name, value in values.items() if f"{above}{name}" not in foreign}
    return {
        name: _without(value, foreign, f"{above}{name}.") if isinstance(value, dict) else value
        for name, value in kept.items()
    }


def _dotted(variable: str) -> str:
    return variable.removeprefix(PREFIX).lower().replace("__", ".")


def _field_of(variable: str, known: Mapping[str, FieldInfo]) -> str:
    dotted = _dotted(variable)
    if dotted in known:
        return dotted
    names = {f"{PREFIX}{each.upper().replace('.', '__')}" for each in known}
    raise ConfigurationError(f"the variable {variable} is not known{_nearest(variable, names)}")


def _set(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{section} must hold keys and values")
        values = inner
    values[last] = value


def _listed(dotted: str, text: str) -> Any:
    """What a variable says of a list. A text that isn't JSON at all is left to the field, which says what is right."""
    if text[:1] not in ("[", "{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{dotted} is not valid JSON: {error}") from None


def _is_list(annotation: Any) -> bool:
    """Whether a field holds a list or a table; other values that begin with a bracket, as addresses do, are texts."""
    return any(get_origin(kind) in (tuple, list, dict) for kind in (annotation, *get_args(annotation)))


def _sections(annotation: Any) -> list[type[BaseModel]]:
    kinds = [annotation, *get_args(annotation)]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _sentence(error: Any, known: Mapping[str, FieldInfo]) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        plain = ".".join(str(part) for part in error["loc"] if not isinstance(part, int))
        return f"the key {path} is not known{_nearest(plain, known.keys())}"
    message = _in_plain_words(error)
    return f"{path}: {message}" if path else message


_KINDS = {
    "missing": "must be given",
    "tuple_type": "must be a list; in a variable, JSON such as [...]",
    "list_type": "must be a list; in a variable, JSON such as [...]",
    "model_type": "must hold keys and values",
    "model_attributes_type": "must hold keys and values",
    "dict_type": "must hold keys and values",
    "string_type": "must be a text",
    "float_type": "must be a number",
    "float_parsing": "must be a number, without a unit",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number, without a unit",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
}
_SHOWN = frozenset({"float_parsing", "int_parsing", "bool_parsing"})


def _in_plain_words(error: Any) -> str:
    """What is wrong, as somebody who writes YAML would say it."""
    if error["type"] in _KINDS:
        return f"{_KINDS[error['type']]}{_given(error)}"
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    given = error["input"]
    return f"{message}, not {given}" if isinstance(given, int | float) and message.startswith("must be") else message


def _given(error: Any) -> str:
    """What was given that isn't of its kind, where it is short and can be no secret; or what to do about it."""
    given = error["input"]
    if error["type"] == "string_type" and isinstance(given, int | float):
        return ": put it in quotes"  # unrepeated, as it may be a secret
    return (
        f", not {given}" if error["type"] in _SHOWN and isinstance(given, str) and len(given) <= SHOWN_CHARS_MAX else ""
    )


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        derived = value.in_force() if isinstance(value, Derived) else {}
        return {name: _plain(derived.get(name, getattr(value, name))) for name in type(value).model_fields}
    if isinstance(value, SecretStr):
        return without_password(value.get_secret_value())
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, Path) else value


def without_password(secret: str) -> str:
    """A URL without its passwords; options that aren't all known may hold one. Anything else is hidden whole.

    A password with a `/`, `?` or `#` that isn't percent-encoded looks like a path or more: such a URL is hidden, too.
    """
    scheme, mark, rest = secret.partition("://")
    place, has_options, options = rest.partition("?")
    netloc, slash, path = place.partition("/")
    if not mark or "@" in rest.removeprefix(netloc) or "#" in rest or netloc.count("[") != netloc.count("]"):
        return MASK if secret else ""
    if not netloc and scheme != "unix":
        return MASK
    login, at, hosts = netloc.rpartition("@")
    user, has_password, _ = login.partition(":")
    login = f"{user}:{MASK}" if has_password else login
    return f"{scheme}://{login}{at}{hosts}{slash}{path}" + (f"?{_shown(options)}" if has_options else "")


def _shown(options: str) -> str:
    pairs = [pair.partition("=") for pair in options.split("&")]
    if not all(name in (*HARMLESS_OPTIONS, SECRET_OPTION) for name, _, _ in pairs):
        return MASK
    return "&".join(f"{name}={MASK if name == SECRET_OPTION else value}" for name, _, value in pairs)
