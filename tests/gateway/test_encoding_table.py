"""The table of `gateway/encoding/README.md` is what the encoders do, streamed or not."""

import asyncio
from collections.abc import Iterator

import httpx
import orjson
import pytest

from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import Encoder, Encoding, build_renderer
from gateway.encoding.prompt_tokenizer import PromptTokenizer, Shared, load_tokenizer
from tests.gateway.api_answers import answer_in_shape
from tests.gateway.assembly import gateway_for
from tests.gateway.encoding_rows import ASKED, KINDS, table
from tests.gateway.mock_engine import MockEngine
from tests.gateway.pipelines import smollm2_content
from tests.gateway.rendered import asked
from tests.gateway.samples import MODEL
from tests.render_matrix import SPECIAL_TOKENS

EXPLAIN = {"x-warmroute-explain": "1"}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[tuple[PromptTokenizer, int]]:
    """SmolLM2's: its texts are short, and encoded inline."""
    pool = EncodePool()
    yield asyncio.run(load_tokenizer(smollm2_content(), Shared.of(pool), 2**20))
    pool.close()


def encoder_of(tokenizer: tuple[PromptTokenizer, int], kind: str, template: str) -> Encoder:
    contents = {"chat_template.jinja": template.encode(), "tokenizer_config.json": orjson.dumps(SPECIAL_TOKENS)}
    return Encoder(tokenizer[0], build_renderer(kind, contents), tokenizer[1])


def class_of(encoding: Encoding) -> str:
    if encoding.tokens is None:
        assert encoding.reason
        return "affinity"
    assert encoding.tokens
    return "exact" if encoding.is_whole else "up to"


def test_the_table_has_a_row_for_every_shape_that_is_tried() -> None:
    assert list(table()) == list(ASKED)


@pytest.mark.parametrize("row", ASKED, ids=lambda row: " ".join(row))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_row_of_the_table_is_what_the_encoders_do(
    tokenizer: tuple[PromptTokenizer, int], row: tuple[str, str], stream: bool
) -> None:
    template, several = ASKED[row]
    for kind, expected in zip(KINDS, table()[row], strict=True):
        encoder = encoder_of(tokenizer, kind, template)
        for fields in several:
            encoding = await encoder.encode(asked(row[0], {**fields, "stream": stream}), 8192)
            assert class_of(encoding) == expected, (kind, fields, encoding.reason)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_class_of_a_request_is_the_tables_and_can_be_seen(
    tokenizer: tuple[PromptTokenizer, int], kind: str
) -> None:
    column = KINDS.index(kind)
    for template in {template for template, _ in ASKED.values()}:
        encoder = encoder_of(tokenizer, kind, template)
        async with (
            MockEngine("a", answer_in_shape) as engine,
            gateway_for([engine], renderer=kind, encoder=encoder) as gateway,
            httpx.AsyncClient(trust_env=False, timeout=10) as client,
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app=gateway.admin),  # type: ignore[arg-type]
                base_url="http://admin",
            ) as admin,
        ):
            for (endpoint, prompt), (of_template, several) in ASKED.items():
                for fields in several if of_template == template else ():
                    expected = table()[endpoint, prompt][column].replace(" ", "-")
                    for stream in (False, True):
                        asked = {"model": MODEL, **fields, "stream": stream}
                        answer = await client.post(gateway.url + endpoint, json=asked, headers=EXPLAIN)
                        assert answer.status_code == 200, (endpoint, prompt, answer.text)
                        assert answer.headers["x-warmroute-encoding"] == expected, (endpoint, prompt)
                    told = await admin.post("/route/explain", params={"endpoint": endpoint}, json=asked)
                    assert told.json()["encoding"] == expected
                    assert (told.json()["encoding_reason"] is None) == (expected == "exact")
            assert gateway.ledger.engines() == ()
