"""Renders as vLLM 0.32 does for models whose prompts come from a chat template (`renderers/online_renderer.py, hf.py`).

Arguments of a template, the later over the earlier: special tokens; the server's own defaults; the request's
`chat_template_kwargs` (null and "auto" count as not given); `enable_thinking`, from `reasoning_effort`, if the request
doesn't say it; `add_generation_prompt`, `documents`, `reasoning_effort`. What the template doesn't read is left out.
`/v1/responses`, `/v1/messages` and `/v1/embeddings` are read in modules of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.encoding.anthropic_chat import SystemRules, chat_of_messages
from gateway.encoding.chat_template import ChatTemplate
from gateway.encoding.content_format import ContentFormat, vllm_content_format
from gateway.encoding.rendering import Rendered, Uncertain, flag, read_alike
from gateway.encoding.responses_chat import chat_of_response
from gateway.encoding.template_files import ModelTemplate, ModelTemplates
from gateway.encoding.vllm_fields import reads_cache
from gateway.encoding.vllm_messages import (
    CALL_FIELDS,
    Message,
    conversation,
    count_media,
    tool_list,
    without_developers,
)
from gateway.openai_schema import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, PAIRS, RESPONSES, InferenceRequest

UNCERTAIN_FIELDS = (
    "truncate_prompt_tokens",
    "kv_transfer_params",
    "prompt_embeds",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "suffix",
    "padding",
)
RESERVED_ARGUMENTS = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize", "self"}
    | {"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Parameters of transformers' `apply_chat_template`: in `chat_template_kwargs` they would be taken for those."""
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
CONTINUED_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""What transformers itself puts behind a message that is to be continued."""
MEDIA_MARK = "\ue0f0media\ue0f1"
"""Private-use characters, which no template writes."""
MEDIA_TOKENS_GUESS = 1024
CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server was started, as far as prompts depend on it. The defaults are vLLM's own.

    `default_arguments` is `--default-chat-template-kwargs`, `content_format` is `--chat-template-content-format`
    (`None` for auto), `drops_unused_tools` is `--exclude-tools-when-tool-choice-none`.
    """

    default_arguments: Mapping[str, Any] = field(default_factory=dict)
    content_format: ContentFormat | None = None
    drops_unused_tools: bool = False


class VllmRenderer:
    """Renders for engines of the kind `vllm`. Immutable; safe to share between threads.

    `has_own_renderer`: this model's chats are rendered by code of vLLM's own (gpt-oss, DeepSeek V3.2 and others).
    """

    def __init__(
        self,
        templates: ModelTemplates,
        settings: ServerSettings | None = None,
        has_own_renderer: bool = False,
    ) -> None:
        self._settings, self._has_own_renderer = settings or ServerSettings(), has_own_renderer
        self._without_tools, self._with_tools = templates.without_tools, templates.with_tools
        self._formats = {
            id(each.template): self._settings.content_format or vllm_content_format(each.template)
            for each in (self._without_tools, self._with_tools)
            if each.template is not None
        }
        self._system_rules = SystemRules([each.template for each in (self._without_tools, self._with_tools)])
        self._prompts: dict[str, Callable[[InferenceRequest], Rendered | bytes]] = {
            CHAT: lambda request: self.render(request.fields),
            COMPLETIONS: _first_prompt,
            EMBEDDINGS: _first_prompt,
            RESPONSES: self._render_response,
            MESSAGES: self._render_messages,
        }

    def prompt(self, request: InferenceRequest) -> Rendered | bytes:
        """See `Renderer`."""
        _check_fields(request.fields)
        if request.endpoint not in self._prompts:
            raise Uncertain("pairs" if request.endpoint in PAIRS else "endpoint")
        return self._prompts[request.endpoint](request)

    def reads_cache(self, request: InferenceRequest) -> bool:
        """See `Renderer`."""
        return reads_cache(request.endpoint, request.fields)

    def render(
        self, fields: Mapping[str, Any], adds_special: bool = False, call_fields: Sequence[str] = CALL_FIELDS
    ) -> Rendered:
        """A chat's prompt. Raises `Uncertain`."""
        if self._has_own_renderer:
            raise Uncertain("own_renderer")
        if fields.get("chat_template") is not None:
            raise Uncertain("chat_template")
        tools = tool_list(fields.get("tools"))
        if tools and fields.get("tool_choice") == "none" and self._settings.drops_unused_tools:
            tools = None
        chosen = self._without_tools if tools is None else self._with_tools
        template = chosen.known()
        is_open, is_continued = (
            flag(fields, "add_generation_prompt", True),
            flag(fields, "continue_final_message", False),
        )
        if is_open and is_continued:
            raise Uncertain("continue_final_message")  # the engine refuses it
        variables = {
            **chosen.special_tokens,
            **self._arguments(fields, template),
            "tools": tools,
            "documents": _documents(fields),
            "add_generation_prompt": is_open,
        }
        adds_special = flag(fields, "add_special_tokens", adds_special)
        messages = self._conversation(fields, chosen, None, call_fields)
        text = _render(template, messages, variables, is_continued)
        media = count_media(fields["messages"])
        if not media:
            return Rendered(text, adds_special)
        marked = _render(template, self._conversation(fields, chosen, MEDIA_MARK, call_fields), variables, is_continued)
        rest = MEDIA_TOKENS_GUESS * media + len(text) // CHARS_PER_TOKEN
        return Rendered(_common_start(text, marked), adds_special, reason="media", rest_tokens=rest)

    def _conversation(
        self, fields: Mapping[str, Any], chosen: ModelTemplate, mark: str | None, call_fields: Sequence[str]
    ) -> list[Message]:
        template = chosen.known()
        messages = conversation(fields["messages"], self._formats[id(template)], mark, call_fields)
        if "'developer'" in template.source or '"developer"' in template.source:
            return messages
        return without_developers(messages)

    def _arguments(self, fields: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any]:
        given = fields.get("chat_template_kwargs")
        given = {} if given is None else given
        if not isinstance(given, Mapping) or given.keys() & RESERVED_ARGUMENTS:
            raise Uncertain("chat_template_kwargs")
        said = {name: value for name, value in given.items() if value is not None and value != "auto"}
        arguments = {**self._settings.default_arguments, **said}
        effort = fields.get("reasoning_effort")
        if effort is not None:
            if effort not in REASONING_EFFORTS:
                raise Uncertain("reasoning_effort")
            arguments["reasoning_effort"] = effort
            if "enable_thinking" not in given:
                arguments["enable_thinking"] = effort != "none"
        read = {name: value for name, value in arguments.items() if name in template.variables}
        read_alike(read, "chat_template_kwargs")
        return read

    def _render_response(self, request: InferenceRequest) -> Rendered:
        # This endpoint's prompts get special tokens whatever the template writes: vLLM's default there.
        return self.render(chat_of_response(request.fields), adds_special=True, call_fields=("name", "arguments"))

    def _render_messages(self, request: InferenceRequest) -> Rendered:
        def render_probe(effort: str) -> str:
            return self.render({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}).text

        return self.render(chat_of_messages(request.fields, self._system_rules, render_probe))


class VllmIdsRenderer:
    """For engines of the kind `vllm-unknown`, whose tokenizer isn't that of `tokenizer.json`: ids alone are known."""

    def prompt(self, request: InferenceRequest) -> Rendered | bytes:
        """See `Renderer`."""
        _check_fields(request.fields)
        if request.prompts and isinstance(request.prompts[0], bytes):
            return request.prompts[0]
        raise Uncertain("own_tokenizer")

    def reads_cache(self, request: InferenceRequest) -> bool:
        """See `Renderer`."""
        return reads_cache(request.endpoint, request.fields)


def _check_fields(fields: Mapping[str, Any]) -> None:
    for name in UNCERTAIN_FIELDS:
        if fields.get(name) is not None:
            raise Uncertain(name)


def _first_prompt(request: InferenceRequest) -> Rendered | bytes:
    if not request.prompts:
        raise Uncertain("messages")  # an embedding of a chat
    prompt = request.prompts[0]
    if isinstance(prompt, bytes):
        return prompt
    return Rendered(prompt, flag(request.fields, "add_special_tokens", True))


def _common_start(text: str, other: str) -> str:
    for place, (one, two) in enumerate(zip(text, other, strict=False)):
        if one != two:
            return text[:place]
    return min(text, other, key=len)


def _documents(fields: Mapping[str, Any]) -> list[dict[str, str]] | None:
    documents = fields.get("documents")
    if documents is None:
        return None
    is_known = isinstance(documents, list) and all(
        isinstance(each, dict) and all(isinstance(value, str) for value in each.values()) for each in documents
    )
    if not is_known:
        raise Uncertain("documents")
    return list(documents)


def _render(template: ChatTemplate, messages: list[Message], variables: Mapping[str, Any], is_continued: bool) -> str:
    if not is_continued:
        return template.render({**variables, "messages": messages})
    final, text_of_final = _marked(messages[-1])
    text = template.render({**variables, "messages": [*messages[:-1], final]})
    mark = CONTINUED_MARK.strip()
    if "content" not in template.source or text_of_final.strip() not in text or mark not in text:
        raise Uncertain("continue_final_message")
    end = text.rindex(mark)
    kept = text[:end]
    return kept if text.startswith(CONTINUED_MARK, end) else kept.rstrip()


def _marked(message: Message) -> tuple[Message, str]:
    """The last message with the mark behind its (last) text, and that text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + CONTINUED_MARK}, content
    for place in reversed(range(len(content))):
        if "text" in content[place]:
            text = content[place]["text"]
            marked = {**content[place], "text": text + CONTINUED_MARK}
            return {**message, "content": [*content[:place], marked, *content[place + 1 :]]}, text
    raise Uncertain("continue_final_message")
