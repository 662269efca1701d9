"""Encoders: tokenizer files by digest, verified, kept on disk, loaded in the background."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import orjson
import pytest

from directory.chunks import pack_tokens
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import ENCODERS_MAX, RETRY_MAX_S, RETRY_S, Encoder, Encoders, build_renderer
from gateway.encoding.files import FILE_BYTES_MAX, FileUnavailable, TokenizerFiles
from gateway.encoding.model_files import ModelFiles
from gateway.encoding.prompt_tokenizer import load_tokenizer
from gateway.encoding.self_check import SelfCheck
from gateway.openai_schema import CHAT, COMPLETIONS, parse_request
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


def smollm2(renderer: str = "reference", **contents: bytes) -> ModelFiles:
    named = {**CONTENTS, **{name.replace("_json", ".json"): content for name, content in contents.items()}}
    return ModelFiles(renderer, tuple(sorted((name, hashlib.sha256(each).hexdigest()) for name, each in named.items())))


@pytest.fixture
async def encoders(tmp_path: Path) -> AsyncIterator[Encoders]:
    encoders = Encoders(files_from(Shelf(*CONTENTS.values()), tmp_path))
    running = asyncio.create_task(encoders.run())
    yield encoders
    running.cancel()
    await asyncio.wait({running})
    encoders.close()


async def until_found(encoders: Encoders, files: ModelFiles) -> None:
    async with asyncio.timeout(60):
        while encoders.find(files) is None:
            await asyncio.sleep(0.01)


async def test_an_encoder_is_loaded_in_the_background_and_gives_the_engines_ids(encoders: Encoders) -> None:
    files = smollm2()
    assert encoders.find(files) is None
    encoders.want([(files, AGENT)])
    assert encoders.state(files) == "loading"
    await until_found(encoders, files)
    assert encoders.state(files) == "exact"
    assert encoders.tokenizer_state(files) == "fastokens, cached pieces"
    encoder = encoders.find(files)
    assert encoder is not None
    for text in ("short", "long text " * 4_000):
        encoding = await encoder.encode(parse_request(COMPLETIONS, orjson.dumps({"model": "m", "prompt": text})), 10**6)
        ids = ENGINES_TOKENIZER.encode(text)
        assert encoding.tokens is not None
        assert list(memoryview(encoding.tokens).cast("I")) == ids
        assert encoding.prompt_tokens == len(ids)


@pytest.fixture(scope="module")
def encoder() -> Iterator[Encoder]:
    pool = EncodePool()
    content = CONTENTS["tokenizer.json"]
    tokenizer, token_chars = asyncio.run(load_tokenizer(content, pool, SelfCheck(pool, lambda: None), 2**20))
    yield Encoder(tokenizer, build_renderer("reference", CONTENTS), token_chars)
    pool.close()


async def test_what_cannot_be_rendered_has_a_reason_and_an_estimate(encoder: Encoder) -> None:
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]})
    encoding = await encoder.encode(parse_request(CHAT, body), 8192)
    assert (encoding.tokens, encoding.reason) == (None, "tools")
    assert encoding.prompt_tokens == len(body) // 4


async def test_a_text_that_can_not_fit_is_not_tokenized(encoder: Encoder) -> None:
    request = parse_request(COMPLETIONS, orjson.dumps({"model": "m", "prompt": "x" * 10_000}))
    assert (await encoder.encode(request, 10)).reason == "too_long"
    assert (await encoder.encode(request, 8192)).reason == ""


async def test_one_broken_model_does_not_block_another(encoders: Encoders) -> None:
    broken = smollm2(renderer="from the future")
    missing = ModelFiles("reference", (("tokenizer.json", "0" * 64),))
    good = ModelFiles("vllm-unknown", smollm2().digests)
    encoders.want([(broken, AGENT), (missing, AGENT), (good, AGENT)])
    await until_found(encoders, good)
    async with asyncio.timeout(60):
        while "loading" in (encoders.state(broken), encoders.state(missing)):
            await asyncio.sleep(0.01)
    assert "renderer" in encoders.state(broken)
    assert "not to be had" in encoders.state(missing)
    assert encoders.state(ModelFiles("reference", ())) == "no tokenizer files"


TEMPLATES = ("{{ messages[0].content }}!", "{{ messages[0].content }}?", "{{ messages[0].content }}.")


def with_template(number: int) -> ModelFiles:
    """A version of the model's files: one engine may have another than the next."""
    content = TEMPLATES[number].encode()
    digests = {name: hashlib.sha256(each).hexdigest() for name, each in CONTENTS.items()}
    digests["chat_template.jinja"] = hashlib.sha256(content).hexdigest()
    return ModelFiles("reference", tuple(sorted(digests.items())))


async def ids_of(encoder: Encoder) -> bytes | None:
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    return (await encoder.encode(parse_request(CHAT, body), 8192)).tokens


async def test_new_files_are_loaded_while_the_old_serve_and_what_nobody_needs_goes(tmp_path: Path) -> None:
    shelf = Shelf(*CONTENTS.values(), *(template.encode() for template in TEMPLATES))
    encoders = Encoders(files_from(shelf, tmp_path))
    running = asyncio.create_task(encoders.run())
    old, new = with_template(0), with_template(1)
    encoders.want([(old, AGENT), (old, AGENT)])
    await until_found(encoders, old)
    held = encoders.find(old)
    assert held is not None
    encoders.want([(old, AGENT), (new, AGENT)])
    assert encoders.find(old) is held
    assert encoders.find(new) is None
    await until_found(encoders, new)
    other = encoders.find(new)
    assert other is not None
    assert encoders.find(old) is held
    assert await ids_of(held) != await ids_of(other)
    assert held.tokenizer == other.tokenizer, "the template alone is another"
    encoders.want([(new, AGENT)])
    assert encoders.find(old) is None
    assert encoders.find(new) is other
    assert await ids_of(held) is not None, "a request that holds it finishes"
    assert [(files, progress.state) for files, progress, _ in encoders.progress()] == [(new, "exact")]
    running.cancel()
    await asyncio.wait({running})
    encoders.close()


async def test_files_that_flap_are_loaded_again(encoders: Encoders) -> None:
    files = ModelFiles("vllm-unknown", ())
    encoders.want([(files, AGENT)])
    await until_found(encoders, files)
    encoders.want([])
    encoders.want([(files, AGENT)])
    assert encoders.find(files) is None
    await until_found(encoders, files)


async def test_an_agent_that_never_answers_holds_up_no_other_model(tmp_path: Path) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "silent":
            await asyncio.Event().wait()
        return shelf(request)

    shelf = Shelf(*CONTENTS.values())
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    encoders = Encoders(TokenizerFiles(tmp_path, client))
    running = asyncio.create_task(encoders.run())
    silent = ModelFiles("reference", (("tokenizer.json", "0" * 64),))
    encoders.want([(silent, "http://silent:1")])
    await asyncio.sleep(0)
    good = ModelFiles("vllm-unknown", smollm2().digests)
    encoders.want([(silent, "http://silent:1"), (good, AGENT)])
    await until_found(encoders, good)
    assert encoders.state(silent) == "loading"
    running.cancel()
    await asyncio.wait({running})
    encoders.close()


async def test_what_can_not_be_used_is_tried_ever_more_seldom_and_what_is_missing_soon_again(tmp_path: Path) -> None:
    pauses: dict[str, list[float]] = {"broken": [], "missing": []}
    broken = smollm2(renderer="from the future")
    missing = ModelFiles("reference", (("tokenizer.json", "0" * 64),))
    is_enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        name = "broken" if encoders.state(broken) != "loading" and len(pauses["broken"]) < 8 else "missing"
        pauses[name].append(seconds)
        if len(pauses[name]) >= 8:
            is_enough.set()
            await asyncio.Event().wait()

    for name, files in (("broken", broken), ("missing", missing)):
        is_enough.clear()
        encoders = Encoders(files_from(Shelf(*CONTENTS.values()), tmp_path / name), sleep=sleep)
        encoders.want([(files, AGENT)])
        running = asyncio.create_task(encoders.run())
        async with asyncio.timeout(20):
            await is_enough.wait()
        running.cancel()
        await asyncio.wait({running})
        encoders.close()
    assert pauses["broken"] == [4.0, 8.0, 16.0, 32.0, RETRY_MAX_S, RETRY_MAX_S, RETRY_MAX_S, RETRY_MAX_S]
    assert set(pauses["missing"]) == {RETRY_S}


async def test_a_fleet_of_endless_files_has_a_bounded_number_of_encoders(encoders: Encoders) -> None:
    many = [ModelFiles("reference", (("tokenizer.json", f"{number:064x}"),)) for number in range(ENCODERS_MAX + 5)]
    encoders.want([(files, "") for files in many])
    assert len(encoders.progress()) == ENCODERS_MAX
    assert "more than 64" in encoders.state(many[-1])


async def test_of_an_engine_whose_tokenizer_is_not_known_token_ids_are_encoded(encoders: Encoders) -> None:
    files = ModelFiles("vllm-unknown", ())
    encoders.want([(files, AGENT)])
    await until_found(encoders, files)
    encoder = encoders.find(files)
    assert encoder is not None
    assert encoders.state(files).startswith("token ids only")
    ids = await encoder.encode(parse_request(COMPLETIONS, orjson.dumps({"model": "m", "prompt": [1, 2, 3]})), 100)
    assert ids.tokens == pack_tokens([1, 2, 3])
    text = await encoder.encode(parse_request(COMPLETIONS, orjson.dumps({"model": "m", "prompt": "x"})), 100)
    assert (text.tokens, text.reason) == (None, "own_tokenizer")
