"""Texts that were encoded at once, as nothing of them was known, are taken apart behind the request's back."""

import asyncio
import logging

from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.piece_encoder import NewText, PieceEncoder

logger = logging.getLogger(__name__)

TEXTS_WAITING_MAX = 16
"""Texts beyond these are let go, and encoded at once again when they come back."""


class PieceLearner:
    """What a prompt's first request needn't wait for: that the next one finds its pieces."""

    def __init__(self, pool: EncodePool) -> None:
        self._pool = pool
        self._texts: asyncio.Queue[tuple[PieceEncoder, NewText]] = asyncio.Queue(TEXTS_WAITING_MAX)

    def consider(self, encoder: PieceEncoder, new: NewText) -> None:
        """Take this one apart soon; never waits."""
        if not self._texts.full():
            self._texts.put_nowait((encoder, new))

    async def run(self) -> None:
        """Take apart what was considered, until cancelled."""
        while True:
            encoder, new = await self._texts.get()
            try:
                await self._learn(encoder, new)
            except Exception:  # the edge of the loop: a backend is foreign code
                logger.exception("an encoded text couldn't be taken apart")

    async def _learn(self, encoder: PieceEncoder, new: NewText) -> None:
        stretches = await self._pool.run_behind(encoder.take_apart, new)
        if stretches is not None:
            encoder.keep(new, stretches)
        elif encoder.depth and encoder.cache is new.cache:
            partial = encoder.look_up(new.text)
            encoder.join(partial, await self._pool.run_behind(encoder.encode_missing, partial), False)
