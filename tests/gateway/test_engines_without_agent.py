"""Engines without an agent whose tokenizer is configured: routed by the first chunk, their files switched alive."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.free_port import free_port
from tests.gateway.mock_engine import MockEngine
from tests.gateway.pipelines import PIPELINES
from tests.gateway.samples import MODEL
from tests.test_two_renderers import CONTENTS

BOUND_S = 60.0


@asynccontextmanager
async def gateway_of(engines: list[MockEngine], model: Path, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """The URLs of a gateway process and of its admin API."""
    port = free_port()
    rows = [{"url": each.url, "name": each.name, "tokenizer": str(model), "kind": "reference"} for each in engines]
    config = {
        "listen": {"port": port},
        "directory": {"url": f"redis://127.0.0.1:{free_port()}"},
        "engines": rows,
        "routing": {"assumed_s": 0},
        "files_folder": str(folder / "files"),
    }
    (folder / "gateway.yaml").write_text(json.dumps(config))
    log = (folder / "log").open("wb")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "warmroute.cli", "gateway", "--config", str(folder / "gateway.yaml"), stderr=log
    )
    try:
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
    finally:
        process.terminate()
        await process.wait()
        log.close()


async def rows_when(client: httpx.AsyncClient, admin: str, holds: Any) -> list[dict[str, Any]]:
    """The engines' rows of `/fleet`, once all are as they should be."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                rows: list[dict[str, Any]] = (await client.get(f"{admin}/fleet")).json()["engines"]
                if all(row["state"] == "ready" and holds(row) for row in rows):
                    return rows
            except httpx.TransportError:  # not there yet
                pass
            await asyncio.sleep(0.05)


async def served_by(client: httpx.AsyncClient, url: str, prompt: str, session: str) -> tuple[str, str]:
    """Who served a prompt, and why."""
    body = {"model": MODEL, "prompt": prompt}
    headers = {"x-session-id": session, "x-warmroute-explain": "1"}
    answer = await client.post(f"{url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-warmroute-engine"], answer.headers["x-warmroute-reason"]


def replace_file(path: Path, content: bytes) -> None:
    path.with_suffix(".new").write_bytes(content)
    os.replace(path.with_suffix(".new"), path)


async def test_prompts_go_by_their_first_chunk_and_new_files_are_used_without_a_restart(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name, content in {**CONTENTS, "tokenizer.json": json.dumps(PIPELINES["gemma"]()).encode()}.items():
        (model / name).write_bytes(content)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        engines = [await stack.enter_async_context(MockEngine(f"e{number}")) for number in range(3)]
        url, admin = await stack.enter_async_context(gateway_of(engines, model, tmp_path))
        rows = await rows_when(client, admin, lambda row: row["encoding"] == "exact")
        before = rows[0]["tokenizer_digest"]
        assert rows[0]["placements"] == "none without an agent"

        documents = [f"Document {number}. " + "The tide runs twice a day. " * 90 for number in range(8)]
        homes = [await served_by(client, url, document, "first") for document in documents]
        assert {reason for _, reason in homes} == {"prefix-affinity"}
        assert len({engine for engine, _ in homes}) > 1, "documents are spread"
        again = [await served_by(client, url, document + "And now?", f"s{n}") for n, document in enumerate(documents)]
        assert again == homes, "another session, another question, the same first chunk"
        assert (await served_by(client, url, "short", "a"))[1] == "session-affinity"

        replace_file(model / "tokenizer.json", b"{")
        rows = await rows_when(client, admin, lambda row: "not a tokenizer.json" in row["encoding"])
        assert rows[0]["encoding"].startswith("exact; new files: ")
        assert rows[0]["tokenizer_digest"] == before, "the old one serves on"
        assert await served_by(client, url, documents[0], "x") == homes[0]

        replace_file(model / "tokenizer.json", json.dumps(PIPELINES["mistral"]()).encode())
        rows = await rows_when(client, admin, lambda row: row["encoding"] == "exact")
        assert rows[0]["tokenizer_digest"] != before
        files = (await client.get(f"{admin}/fleet")).json()["model_files"]
        assert [(row["state"], row["engines"]) for row in files] == [("exact", ["e0", "e1", "e2"])], "the old is let go"
        metrics = (await client.get(f"{admin}/metrics")).text
        assert 'warmroute_model_files{state="exact"} 1.0' in metrics
        assert "warmroute_directory_lookup_seconds_count 0.0" in metrics, "nobody announces what they hold"
