"""Encoders: tokenizer files by digest, verified, kept on disk, loaded in the background."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import orjson
import pytest

from directory.members import EngineRegistration
from gateway.encoding.encoder import Encoders
from gateway.encoding.files import FILE_BYTES_MAX, FileUnavailable, TokenizerFiles
from gateway.openai_schema import CHAT, COMPLETIONS, parse_request
from tests.gateway.samples import engine_registration
from tests.test_two_renderers import CONTENTS, ENGINES_TOKENIZER

AGENT = "http://agent:1"
CONTENT = b"the content"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Shelf:
    """An agent's files, by digest; what it gives can be falsified."""

    def __init__(self, *contents: bytes) -> None:
        self.files = {hashlib.sha256(content).hexdigest(): content for content in contents}
        self.asked = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        content = self.files.get(request.url.path.removeprefix("/files/"))
        return httpx.Response(404) if content is None else httpx.Response(200, content=content)


def files_from(shelf: Shelf, folder: Path) -> TokenizerFiles:
    return TokenizerFiles(folder, httpx.AsyncClient(transport=httpx.MockTransport(shelf)))


async def test_a_file_is_fetched_once_and_then_read_from_disk(tmp_path: Path) -> None:
    shelf = Shelf(CONTENT)
    assert await files_from(shelf, tmp_path / "new").get(DIGEST, [AGENT]) == CONTENT
    assert await files_from(shelf, tmp_path / "new").get(DIGEST, []) == CONTENT
    assert shelf.asked == 1


async def test_a_file_that_does_not_match_its_digest_is_never_used_nor_kept(tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.files[DIGEST] = b"something else"
    with pytest.raises(FileUnavailable, match="doesn't match"):
        await files_from(shelf, tmp_path).get(DIGEST, [AGENT])
    assert list(tmp_path.iterdir()) == []


async def test_a_corrupted_file_on_disk_is_fetched_anew(tmp_path: Path) -> None:
    (tmp_path / DIGEST).write_bytes(b"bit rot")
    assert await files_from(Shelf(CONTENT), tmp_path).get(DIGEST, [AGENT]) == CONTENT
    assert (tmp_path / DIGEST).read_bytes() == CONTENT


async def test_the_next_agent_is_asked_when_one_has_nothing(tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "dead":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, content=CONTENT)

    files = TokenizerFiles(tmp_path, httpx.AsyncClient(transport=httpx.MockTransport(answer)))
    assert await files.get(DIGEST, ["http://dead:1", AGENT]) == CONTENT


async def test_an_endless_file_is_given_up(tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.files[DIGEST] = b"x" * (FILE_BYTES_MAX + 1)
    with pytest.raises(FileUnavailable, match="larger"):
        await files_from(shelf, tmp_path).get(DIGEST, [AGENT])


async def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert await files_from(Shelf(CONTENT), tmp_path / "file" / "below").get(DIGEST, [AGENT]) == CONTENT


def smollm2(**other: object) -> EngineRegistration:
    files = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}
    return engine_registration("a", tokenizer_files=files, **other)


@pytest.fixture
async def encoders(tmp_path: Path) -> AsyncIterator[Encoders]:
    encoders = Encoders(files_from(Shelf(*CONTENTS.values()), tmp_path))
    running = asyncio.create_task(encoders.run())
    yield encoders
    running.cancel()
    await asyncio.wait({running})
    encoders.close()


async def until_found(encoders: Encoders, registration: EngineRegistration) -> None:
    async with asyncio.timeout(60):
        while encoders.find(registration) is None:
            await asyncio.sleep(0.01)


async def test_an_encoder_is_loaded_in_the_background_and_gives_the_engines_ids(encoders: Encoders) -> None:
    registration = smollm2()
    assert encoders.find(registration) is None
    encoders.want([(registration, AGENT)])
    assert encoders.state(registration) == "loading"
    await until_found(encoders, registration)
    assert encoders.state(registration) == "exact"
    assert encoders.tokenizer_state(registration) == "fastokens, cached pieces"
    encoder = encoders.find(registration)
    assert encoder is not None
    for text in ("short", "long text " * 4_000):
        encoding = await encoder.encode(parse_request(COMPLETIONS, orjson.dumps({"model": "m", "prompt": text})), 10**6)
        ids = ENGINES_TOKENIZER.encode(text)
        assert encoding.tokens is not None
        assert list(memoryview(encoding.tokens).cast("I")) == ids
        assert encoding.prompt_tokens == len(ids)


async def test_what_cannot_be_rendered_has_a_reason_and_an_estimate(encoders: Encoders) -> None:
    registration = smollm2()
    encoders.want([(registration, AGENT)])
    await until_found(encoders, registration)
    encoder = encoders.find(registration)
    assert encoder is not None
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]})
    encoding = await encoder.encode(parse_request(CHAT, body), 8192)
    assert (encoding.tokens, encoding.reason) == (None, "tools")
    assert encoding.prompt_tokens == len(body) // 4


async def test_a_text_that_can_not_fit_is_not_tokenized(encoders: Encoders) -> None:
    registration = smollm2()
    encoders.want([(registration, AGENT)])
    await until_found(encoders, registration)
    encoder = encoders.find(registration)
    assert encoder is not None
    request = parse_request(COMPLETIONS, orjson.dumps({"model": "m", "prompt": "x" * 10_000}))
    assert (await encoder.encode(request, 10)).reason == "too_long"
    assert (await encoder.encode(request, 8192)).reason == ""


async def test_one_broken_model_does_not_block_another(encoders: Encoders) -> None:
    broken = smollm2(renderer="from the future")
    missing = engine_registration("b", tokenizer_files={"tokenizer.json": "0" * 64})
    good = smollm2()
    encoders.want([(broken, AGENT), (missing, AGENT), (good, AGENT)])
    await until_found(encoders, good)
    assert "renderer" in encoders.state(broken)
    assert "not to be had" in encoders.state(missing)
    assert encoders.state(engine_registration("c")) == "no tokenizer files"


async def test_an_encoder_nobody_needs_is_let_go(encoders: Encoders) -> None:
    registration = smollm2()
    encoders.want([(registration, AGENT)])
    await until_found(encoders, registration)
    encoders.want([])
    assert encoders.find(registration) is None
