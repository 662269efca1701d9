"""Run by vLLM's own Python: what vLLM renders of chats. Reads a job from stdin, writes JSON to stdout.

The job is {"templates": {name: [template, special tokens]}, "chats": {name: request}}; the answer has, by template and
chat, the text, or null where vLLM refuses. The way is that of vLLM 0.32's `OnlineRenderer.render_chat`, without an
engine. `tests/vectors/renders.json` holds such answers; `python -m tests.vllm.test_render_vectors` writes it anew.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import merge_kwargs
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template


class TemplateOnly:
    """As much of a tokenizer as rendering needs."""

    name_or_path = ""

    def __init__(self, template: str, special_tokens: dict[str, str]) -> None:
        self._template, self._special_tokens = template, special_tokens

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        return chat_template or self._template

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **arguments: Any,
    ) -> Any:
        if continue_final_message and add_generation_prompt:
            raise ValueError("both to be continued and open")
        texts, _ = render_jinja_template(
            [conversation],
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self._special_tokens, **arguments},
        )
        return [texts[0]] if tokenize else texts[0]


MODEL = SimpleNamespace(
    multimodal_config=None,
    enable_prompt_embeds=False,
    tokenizer_revision=None,
    revision=None,
    code_revision=None,
    trust_remote_code=False,
    tokenizer="",
    model="",
)


def render(template: str, special_tokens: dict[str, str], fields: dict[str, Any]) -> str | None:
    try:
        request = ChatCompletionRequest(**fields)
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        defaults = merge_kwargs({}, {"tools": tools, "tokenize": False})
        params = request.build_chat_params(None, "auto").with_defaults(defaults)
        content_format = _detect_content_format(template, default="string")
        messages, _, _ = parse_chat_messages(request.messages, MODEL, content_format)
        arguments = {**params.get_apply_chat_template_kwargs(), "chat_template": template}
        rendered = safe_apply_chat_template(MODEL, TemplateOnly(template, special_tokens), messages, **arguments)
        return rendered if isinstance(rendered, str) else None  # told to tokenize: no text to compare
    except Exception:  # noqa: BLE001 - whatever it refuses
        return None


if __name__ == "__main__":
    job = json.load(sys.stdin)
    answer = {
        name: {each: render(template, special_tokens, fields) for each, fields in job["chats"].items()}
        for name, (template, special_tokens) in job["templates"].items()
    }
    sys.stdout.write("\n" + json.dumps(answer))
