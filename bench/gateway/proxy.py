"""A proxy as one writes it first, to compare with: FastAPI and httpx, forwarding in turn, and nothing else.

python -m bench.gateway.proxy PORT ENGINE_URL...
"""

import contextlib
import itertools
import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse


def create_proxy(urls: list[str]) -> FastAPI:
    """The application."""
    turn = itertools.cycle(urls)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def forward(request: Request) -> Response:
        headers = {"content-type": "application/json"}
        asked = client.build_request(
            "POST", next(turn) + "/v1/chat/completions", content=await request.body(), headers=headers
        )
        answer = await client.send(asked, stream=True)
        media_type = answer.headers["content-type"]
        if not media_type.startswith("text/event-stream"):
            return Response(await answer.aread(), answer.status_code, media_type=media_type)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, media_type=media_type)

    return app


if __name__ == "__main__":
    uvicorn.run(create_proxy(sys.argv[2:]), port=int(sys.argv[1]), log_level="warning", access_log=False)
