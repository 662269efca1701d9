"""A prompt longer than its host's DRAM is loaded from files whole, with the tokens of no cache."""

from pathlib import Path

import pytest

from tests.directory.stands import running_valkey
from tests.vllm.engines import running_engines
from tests.vllm.fleet import CHUNK_TOKENS, START_BOUND_S, AgentProcess, ask, document, reset
from tests.warmroute.fleets import until

pytestmark = pytest.mark.timeout(900)
PROMPT = document("tides", 160)
SMALL_DRAM_GB, SLOTS = 0.05, 4


def test_a_prompt_longer_than_dram_comes_from_nvme_whole_with_the_tokens_of_no_cache(tmp_path: Path) -> None:
    with running_valkey() as server:
        large = AgentProcess("h1", tmp_path, server.connection_url, dram_gb=0.6, nvme_gb=2)
        try:
            with running_engines(tmp_path, {"one": large.door}) as engines:
                until(lambda: large.is_attached("one"), START_BOUND_S, "the engine is attached")
                computed = ask(engines["one"].url, PROMPT)
                chunks = (computed.prompt_tokens - 1) // CHUNK_TOKENS
                assert (computed.cached_tokens, chunks > SLOTS) == (0, True)
                large.until_written(chunks)
                large.end()
                small = AgentProcess("h1", tmp_path, server.connection_url, dram_gb=SMALL_DRAM_GB, nvme_gb=2)
                try:
                    until(lambda: small.is_attached("one"), START_BOUND_S, "the engine is attached again")
                    until(lambda: not small.status()["tiers"]["nvme"]["is_restoring"], START_BOUND_S, "the files")
                    assert small.status()["tiers"]["dram"]["slots"] == SLOTS
                    reset(engines["one"].launch)
                    again = ask(engines["one"].url, PROMPT)
                    assert again.text == computed.text
                    assert again.cached_tokens >= chunks * CHUNK_TOKENS
                finally:
                    small.end()
        finally:
            large.end()
