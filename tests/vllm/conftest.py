"""The vLLM that these tests run: installed where it isn't yet. Nothing here is skipped."""

import sys

import pytest

from warmroute.local_fleet import find_model
from warmroute.vllm.installation import VllmInstallation, install


@pytest.fixture(scope="session")
def vllm() -> VllmInstallation:
    return install(find_model(None), say=lambda line: print(line, file=sys.stderr, flush=True))
