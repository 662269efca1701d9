"""Whether a template takes a message's content as one text or as a list of parts: guessed from its syntax by engines.

Both engines look for a loop over a message's content. vLLM 0.32 (`renderers/hf.py`) follows names: what is set to
`messages` or to a part of it, what loops over those, and macros that are given a content. SGLang 0.5.23
(`parser/jinja_template_utils.py`) knows three names of a message, and takes any template that speaks of media for one
of parts. Their slips are repeated here: where vLLM's search fails (at a loop over pairs), it says "one text".
"""

from collections.abc import Iterator
from enum import Enum

from jinja2 import nodes

from gateway.encoding.chat_template import ChatTemplate

SGLANG_MEDIA_WORDS = ("image", "audio", "video", "vision")
SGLANG_MESSAGES = ("message", "msg", "m")


class ContentFormat(Enum):
    """What a template is given as a message's content."""

    TEXT = "string"
    PARTS = "openai"


class _SearchFailed(Exception):
    """Where vLLM's own search raises."""


def vllm_content_format(template: ChatTemplate) -> ContentFormat:
    """What vLLM detects."""
    try:
        has_loop = next(_content_loops(template.tree), None) is not None
    except _SearchFailed:
        return ContentFormat.TEXT
    return ContentFormat.PARTS if has_loop else ContentFormat.TEXT


def sglang_content_format(template: ChatTemplate) -> ContentFormat:
    """What SGLang detects."""
    if any(word in template.source for word in SGLANG_MEDIA_WORDS):
        return ContentFormat.PARTS
    loops = template.tree.find_all(nodes.For)
    has_loop = any(_leads_to(loop.iter, name, "content") for loop in loops for name in SGLANG_MESSAGES)
    return ContentFormat.PARTS if has_loop else ContentFormat.TEXT


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    messages = list(_message_names(tree))
    parameters, in_macros = _content_parameters(tree, messages)
    for loop in tree.find_all(nodes.For):
        if any(_leads_to(loop.iter, name, "content") for name in messages):
            _name(loop.target)
            yield loop
        elif isinstance(loop.iter, nodes.Name):
            is_parameter = loop.iter.name in parameters.get(id(loop), ())
            if is_parameter or (id(loop) not in in_macros and loop.iter.name == "content"):
                _name(loop.target)
                yield loop


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """What loops over messages call one of them."""
    lists = _names_of(tree, "messages")
    for loop in tree.find_all(nodes.For):
        if any(_leads_to(loop.iter, name) for name in lists):
            yield _name(loop.target)


def _names_of(tree: nodes.Template, root: str) -> list[str]:
    """`root`, and whatever is set to it or to a slice or a filtered form of it."""
    names, position = [root], 0
    while position < len(names):
        for assignment in tree.find_all(nodes.Assign):
            if _leads_to(assignment.node, names[position]):
                name = _name(assignment.target)
                if name not in names:
                    names.append(name)
        position += 1
    return names


def _content_parameters(tree: nodes.Template, messages: list[str]) -> tuple[dict[int, set[str]], set[int]]:
    """By loop inside a macro: the macro's parameters that are given a content. And all loops inside macros."""
    parameters: dict[int, set[str]] = {}
    in_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in tree.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            for name, argument in zip(names, call.args, strict=False):
                if any(_leads_to(argument, message, "content") for message in messages):
                    given.add(name)
            for keyword in call.kwargs:
                if keyword.key in names and any(_leads_to(keyword.value, each, "content") for each in messages):
                    given.add(keyword.key)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if given:
                parameters[id(loop)] = given
    return parameters, in_macros


def _leads_to(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether this is the variable, or its member `key`, perhaps filtered, sliced or tested."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return _is_name(node, name)
    if isinstance(node, nodes.Getattr):
        return _is_name(node.node, name) and node.attr == key
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return False


def _is_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _SearchFailed
    return target.name
