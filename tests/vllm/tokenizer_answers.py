"""Run by vLLM's own Python: how vLLM's tokenizers encode. Reads a job from stdin, writes JSON to stdout.

The job is {"folders": {name: folder}, "texts": [...]}; the answer has, by name, what our connector makes of the
tokenizer that vLLM's registry gives for the folder, and the ids of its call for every text, without and with special
tokens, or null where it refuses.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config

from nodeagent.engines.vllm.tokenizer_in_use import tokenizer_in_use


def called(tokenizer: Any, text: str, adds_special: bool) -> list[int] | None:
    try:
        return list(tokenizer(text, truncation=True, max_length=100_000, add_special_tokens=adds_special)["input_ids"])
    except ValueError:
        return None


def answer(folder: str, texts: list[str]) -> dict[str, Any]:
    model = SimpleNamespace(
        skip_tokenizer_init=False,
        tokenizer=folder,
        runner_type="generate",
        tokenizer_mode="auto",
        tokenizer_revision=None,
        trust_remote_code=False,
    )
    tokenizer: Any = cached_tokenizer_from_config(model)  # type: ignore[arg-type]
    ids = [called(tokenizer, text, adds_special) for text in texts for adds_special in (False, True)]
    in_use = tokenizer_in_use(tokenizer)
    files = {name: content.decode() for name, content in in_use.files(Path(folder)).items()}
    backend = f"{type(tokenizer.backend_tokenizer).__module__}.{type(tokenizer.backend_tokenizer).__name__}"
    return {"ids": ids, "reason": in_use.reason, "files": files, "backend": backend}


if __name__ == "__main__":
    job = json.load(sys.stdin)
    answers = {name: answer(folder, job["texts"]) for name, folder in job["folders"].items()}
    sys.stdout.write("\n" + json.dumps(answers))
