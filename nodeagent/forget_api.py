"""`POST /forget`: has the agent forget, and gives the receipt. FORGET.md documents it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

from directory.members import EngineRegistration
from nodeagent.errors import ForgetBusy, ForgetRefused, TombstonesFull
from nodeagent.forget_receipt import Receipt
from nodeagent.forget_request import ForgetRequest, read_request
from nodeagent.http_api import bounded_body

BODY_BYTES_MAX = 64 << 20
"""Four million token ids, or all keys that are taken at once."""
BODIES_MAX = 4
"""So many are read at a time: they are large."""


def create_forget_api(
    forget: Callable[[ForgetRequest], Awaitable[Receipt]], engines: Callable[[], Sequence[EngineRegistration]]
) -> APIRouter:
    """The route. `engines` are those of this host: they know the identities that go by one digest."""
    router = APIRouter()
    reading = asyncio.Semaphore(BODIES_MAX)

    @router.post("/forget")
    async def forget_chunks(request: Request, response: Response) -> dict[str, Any]:
        if reading.locked():
            raise HTTPException(503, f"{BODIES_MAX} requests to forget are being read; try again")
        async with reading:
            body = await bounded_body(request, BODY_BYTES_MAX)
        try:
            # Off the event loop: millions of token ids are read and hashed.
            receipt = await forget(await asyncio.to_thread(read_request, body, engines()))
        except ForgetRefused as error:
            raise HTTPException(400, str(error)) from error
        except TombstonesFull as error:
            raise HTTPException(409, str(error)) from error
        except ForgetBusy as error:
            raise HTTPException(503, str(error)) from error
        if not receipt.is_confirmed:
            response.status_code = 503
        return receipt.data()

    return router
