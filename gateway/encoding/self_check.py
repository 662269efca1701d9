"""A sample of what was encoded from pieces, encoded again as a whole: a proof covers much, and not everything."""

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.piece_encoder import Depth, PieceEncoder
from gateway.encoding.tokenizer import Backend

logger = logging.getLogger(__name__)

SAMPLE_SHARE = 0.001
SAMPLES_WAITING_MAX = 4
"""Samples beyond these are let go: they hold texts."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A text whose `ids` came from pieces, taken apart to `depth`; and the encoder to be told if they are wrong."""

    encoder: PieceEncoder
    depth: Depth
    whole: Backend
    text: str
    adds_special: bool
    ids: bytes


class SelfCheck:
    """Encodes one text in a thousand again, as a whole and behind everything else, and compares.

    Wrong ids would be wrong keys, and silent. So at the first of them the encoder forgets all it knows and takes texts
    less far apart from then on; `on_mismatch` counts it, and `on_match` what was right.
    """

    def __init__(
        self,
        pool: EncodePool,
        on_mismatch: Callable[[], object],
        on_match: Callable[[], object] = lambda: None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._pool, self._draw = pool, draw
        self._on_mismatch, self._on_match = on_mismatch, on_match
        self._samples: asyncio.Queue[Sample] = asyncio.Queue(SAMPLES_WAITING_MAX)

    def consider(self, sample: Sample) -> None:
        """Perhaps check this one; never waits."""
        if self._draw() < SAMPLE_SHARE and not self._samples.full():
            self._samples.put_nowait(sample)

    async def run(self) -> None:
        """Check what was considered, until cancelled."""
        while True:
            sample = await self._samples.get()
            try:
                ids = await self._pool.run_behind(sample.whole.encode, sample.text, sample.adds_special)
            except Exception:  # the edge of the loop: a backend is foreign code
                logger.exception("a sample of encoded texts couldn't be checked")
                continue
            if ids == sample.ids:
                self._on_match()
            elif sample.depth:
                self._on_mismatch()
                if sample.encoder.depth >= sample.depth:  # else another sample of that depth has told already
                    self._distrust(sample, ids)

    def _distrust(self, sample: Sample, ids: bytes) -> None:
        encoder = sample.encoder
        encoder.depth = Depth(sample.depth - 1)
        encoder.flush()
        logger.error(
            "ids from pieces differ from the whole text's, at token %d of %d (text of %d characters, sha256 %s): "
            "this tokenizer's texts are now taken apart no further than %s",
            _first_difference(ids, sample.ids),
            len(ids) // 4,
            len(sample.text),
            hashlib.sha256(sample.text.encode()).hexdigest()[:16],
            encoder.depth.name,
        )


def _first_difference(ids: bytes, others: bytes) -> int:
    length = min(len(ids), len(others)) // 4
    return next((i for i in range(length) if ids[i * 4 : i * 4 + 4] != others[i * 4 : i * 4 + 4]), length)
