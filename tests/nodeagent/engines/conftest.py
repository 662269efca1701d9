"""Models for the tests: a tiny made-up one, and the real one where it is installed."""

from pathlib import Path

import pytest

from nodeagent.engines.reference.errors import ModelFileError
from nodeagent.engines.reference.loaded_model import LoadedModel, default_model_path, load
from tests.nodeagent.engines import tiny_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> LoadedModel:
    return load(tiny_path, "tiny", threads=1, chunk_tokens=tiny_model.CHUNK_TOKENS)


@pytest.fixture(scope="session")
def real() -> LoadedModel:
    try:
        path = default_model_path()
    except ModelFileError as error:
        pytest.skip(str(error))
    return load(path, "smollm2-135m-instruct", threads=2)
