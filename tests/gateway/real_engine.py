"""The reference engine with a tiny model, behind a real socket, and the encoder that a gateway has for it."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from directory.chunks import pack_tokens
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import Encoder, build_renderer
from gateway.encoding.prompt_tokenizer import Shared, WholeTexts
from nodeagent.engines.reference.loaded_model import load
from nodeagent.engines.reference.server import create_app
from tests.gateway.assembly import ByteBackend, serving
from tests.gateway.samples import MODEL
from tests.nodeagent.engines import tiny_model
from tests.nodeagent.engines.fakes import build_service


class EnginesBackend(ByteBackend):
    """The reference engine's own tokenizer."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        return pack_tokens(self._encode(text))


@contextlib.asynccontextmanager
async def real_engine(folder: Path) -> AsyncIterator[tuple[str, Encoder]]:
    """Its URL, and its encoder."""
    loaded = load(tiny_model.write_gguf(folder / "tiny.gguf"), MODEL, threads=1, chunk_tokens=tiny_model.CHUNK_TOKENS)
    service, pool = build_service(loaded), EncodePool()
    renderer = build_renderer("reference", loaded.files.as_mapping())
    encoder = Encoder(WholeTexts(EnginesBackend(loaded.tokenizer.encode), Shared.of(pool), "for tests"), renderer, 100)
    try:
        async with service.running(), serving(create_app(service)) as url:
            yield url, encoder
    finally:
        pool.close()
