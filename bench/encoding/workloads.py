"""Prompts as they come: prose, code and Chinese, in conversations and collections of documents, drawn from a seed.

Prose and code are the standard library's own docstrings and sources: real text that is there on every machine.
"""
# ruff: noqa: E501, RUF001 - Chinese characters are wide, and some look like others

import ast
import functools
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = 40
DOCSTRING_CHARS_MIN = 200
CHINESE = (
    "大型语言模型的推理成本主要来自对提示词的预填充。", "如果前缀已经在缓存中，就不必重新计算。", "他昨天去了北京，今天回来。",
    "数据库的索引可以显著加快查询速度。", "请总结下面的文档，并回答最后的问题。", "这座桥建于一九三二年，全长五百米。",
    "网络延迟与带宽是两个不同的概念。", "天气预报说明天有雨，记得带伞。", "光的速度约为每秒三十万公里。",
)  # fmt: skip
TEMPLATES = {
    "llama3_1": ("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
    "gpt_oss": ("<|start|>", "<|message|>", "<|end|>"),
    "deepseek_v3": ("<｜", "｜>", "<｜end▁of▁sentence｜>"),
    "mistral": ("[INST] ", ": ", " [/INST]"),
    "llama2": ("[INST] ", ": ", " [/INST]"),
    "gemma3": ("<start_of_turn>", "\n", "<end_of_turn>\n"),
}
CHATML = ("<|im_start|>", "\n", "<|im_end|>\n")


@functools.cache
def _library() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paragraphs of prose, and pieces of code."""
    prose, code = [], []
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py"))[:MODULES]:
        source = path.read_text(encoding="utf-8", errors="ignore")
        lines = source.splitlines(keepends=True)
        code += ["".join(lines[start : start + 30]) for start in range(0, len(lines), 30)]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node) or ""
                if len(docstring) >= DOCSTRING_CHARS_MIN:
                    prose.append(docstring)
    return tuple(prose), tuple(code)


def template_of(family: str) -> str:
    """A chat template with the family's own added tokens, for jinja2."""
    before, between, after = TEMPLATES.get(family, CHATML)
    turn = f"{{{{ {before!r} + message['role'] + {between!r} + message['content'] + {after!r} }}}}"
    opening = f"{{{{ {before!r} + 'assistant' + {between!r} }}}}"
    return f"{{% for message in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt %}}{opening}{{% endif %}}"


@dataclass
class Writer:
    """Writes texts nobody has seen before: what is drawn is shuffled by sentences and lines."""

    choose: random.Random

    def text(self, characters: int) -> str:
        """Three parts prose, one code, a little Chinese."""
        prose, code = _library()
        parts: list[str] = []
        length = 0
        while length < characters:
            kind = self.choose.random()
            if kind < 0.65:
                part = self._mixed(prose, ". ", 6)
            elif kind < 0.9:
                part = "```python\n" + self._mixed(code, "\n", 25) + "\n```"
            else:
                part = "".join(self.choose.choices(CHINESE, k=6))
            parts.append(part)
            length += len(part) + 2
        return "\n\n".join(parts)[:characters]

    def _mixed(self, sources: Sequence[str], separator: str, pieces: int) -> str:
        drawn = [self.choose.choice(self.choose.choice(sources).split(separator)) for _ in range(pieces)]
        return separator.join(drawn)


def conversation(writer: Writer, turns: int, turn_chars: int) -> list[list[dict[str, str]]]:
    """The messages of each request of a conversation, one more turn in each."""
    messages = [{"role": "system", "content": writer.text(1500)}]
    requests: list[list[dict[str, Any]]] = []
    for _ in range(turns):
        messages.append({"role": "user", "content": writer.text(turn_chars // 3)})
        requests.append(list(messages))
        messages.append({"role": "assistant", "content": writer.text(turn_chars * 2 // 3)})
    return requests


def questions(writer: Writer, documents: Sequence[str], count: int) -> list[list[dict[str, str]]]:
    """Messages that put the same documents in another order, and ask something new."""
    requests = []
    for number in range(count):
        shuffled = list(documents)
        writer.choose.shuffle(shuffled)
        body = "\n\n".join(f"Document [{place}]\n{document}" for place, document in enumerate(shuffled, 1))
        content = f"Use the documents below.\n\n{body}\n\nQuestion {number}: {writer.text(200)}"
        requests.append([{"role": "user", "content": content}])
    return requests
