"""A model's chat template in jinja2's sandbox, as transformers sets it up; compiled once.

Source: transformers 5.19, `utils/chat_template_utils.py`. `tojson` doesn't escape for HTML, `raise_exception` and
`strftime_now` are there, and `{% generation %}` passes its body on.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.encoding.rendering import Uncertain

TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError
)  # fmt: skip
"""What a template can raise over a client's values."""
CLOCK_MARGIN_S = 30.0
"""By how much the engine's clock, when it renders, may differ from this one. Time zones are taken to be the same."""


class TemplateBroken(ValueError):
    """This text isn't a template."""


class ChatTemplate:
    """A compiled template. Immutable; safe to share between threads. Raises `TemplateBroken`.

    `variables` are the names it reads that it doesn't set itself; `tree` is its syntax.
    """

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        self.source, self._now = source, now
        try:
            self.tree: nodes.Template = environment.parse(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(self.tree))
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateBroken(f"the chat template can't be read: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises `Uncertain` where the template refuses, or tells a time that another clock may not show."""
        try:
            return self._template.render(variables)
        except TEMPLATE_ERRORS as error:
            raise Uncertain("template_error") from error

    def _strftime_now(self, format: str) -> str:
        margin, now = timedelta(seconds=CLOCK_MARGIN_S), self._now()
        early, late = (now - margin).strftime(format), (now + margin).strftime(format)
        if early != late:
            raise Uncertain("clock")
        return early


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: a block with a scope of its own, and nothing else here."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """See `jinja2.ext.Extension`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("pass_on"), [], [], body).set_lineno(line)

    def pass_on(self, caller: Callable[[], str]) -> str:
        """The block's own text."""
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
