"""The gateway's token ids are real vLLM's: its render endpoints against the encoder, over the matrix.

Two engines: one with the model's own template, and one with a template that shows all that it is given.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import Encoder, build_renderer
from gateway.encoding.local_model_reader import read_apart
from gateway.encoding.prompt_tokenizer import load_tokenizer
from gateway.encoding.self_check import SelfCheck
from gateway.openai_schema import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.gateway.rendered import asked
from tests.render_matrix import CHATS, SHOW_ALL, TORTURE
from tests.render_matrix import MESSAGES as MESSAGES_ASKED
from tests.render_matrix import RESPONSES as RESPONSES_ASKED
from tests.vllm.engines import model_folder, models_folder, running_engines
from tests.vllm.fleet import ANSWER_BOUND_S, MODEL

pytestmark = pytest.mark.timeout(900)
FLAGS = ("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
TEMPLATES = ("its own", "shows all")
LEFT_UNKNOWN = [CHATS["reserved arguments"]]
"""Served by the engine, and not followed: the argument becomes one of transformers' own function."""
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    *((CHAT, name, fields) for name, fields in CHATS.items()),
    *((MESSAGES, name, {"max_tokens": 1100, **fields}) for name, fields in MESSAGES_ASKED.items()),
    *((RESPONSES, name, fields) for name, fields in RESPONSES_ASKED.items()),
    (COMPLETIONS, "torture", {"prompt": TORTURE}),
    (COMPLETIONS, "no special tokens", {"prompt": TORTURE, "add_special_tokens": False}),
]


class Side:
    """An engine, and the gateway's encoder for its files."""

    def __init__(self, url: str, folder: Path, pool: EncodePool) -> None:
        files = dict(asyncio.run(read_apart(folder, "vllm")).contents)
        check = SelfCheck(pool, lambda: None)
        tokenizer, token_chars = asyncio.run(load_tokenizer(files["tokenizer.json"], pool, check, 2**20))
        self.url, self._encoder = url, Encoder(tokenizer, build_renderer("vllm", files), token_chars)

    def engines_ids(self, endpoint: str, fields: dict[str, Any]) -> list[int] | None:
        """What the engine would see; `None` where it refuses the request."""
        body = {"model": MODEL, **fields}
        answer = httpx.post(f"{self.url}{endpoint}/render", json=body, timeout=ANSWER_BOUND_S, trust_env=False)
        if answer.status_code != 200:
            assert answer.status_code in (400, 422), answer.text
            return None
        rendered = answer.json()
        return list((rendered[0] if isinstance(rendered, list) else rendered)["token_ids"])

    def gateways_ids(self, endpoint: str, fields: dict[str, Any]) -> list[int] | None:
        encoding = asyncio.run(self._encoder.encode(asked(endpoint, fields), 8192))
        return None if encoding.tokens is None else list(memoryview(encoding.tokens).cast("I"))


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Side]]:
    pool = EncodePool()
    with models_folder() as models:
        shows_all = models / "shows-all"
        shows_all.mkdir()
        for path in model_folder().iterdir():
            if path.name != "chat_template.jinja":
                (shows_all / path.name).symlink_to(path)
        (shows_all / "chat_template.jinja").write_text(SHOW_ALL)
        folders = dict(zip(TEMPLATES, (model_folder(), shows_all), strict=True))
        names = dict(zip(TEMPLATES, ("own", "all"), strict=True))
        of_engine = {names[template]: folder for template, folder in folders.items()}
        with running_engines(
            tmp_path_factory.mktemp("v"), dict.fromkeys(of_engine), models=of_engine, flags=FLAGS
        ) as engines:
            yield {template: Side(engines[names[template]].url, folders[template], pool) for template in TEMPLATES}
    pool.close()


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("endpoint", "fields"), [pytest.param(*each[::2], id=" ".join(each[:2])) for each in REQUESTS])
def test_the_ids_are_the_engines(sides: dict[str, Side], template: str, endpoint: str, fields: dict[str, Any]) -> None:
    ids = sides[template].engines_ids(endpoint, fields)
    if ids is not None:
        assert sides[template].gateways_ids(endpoint, fields) == (None if fields in LEFT_UNKNOWN else ids)


def test_most_of_the_matrix_is_served(sides: dict[str, Side]) -> None:
    refused = [name for _, name, fields in REQUESTS if sides["its own"].engines_ids(_, fields) is None]
    assert len(refused) < len(REQUESTS) / 4
