"""The account of texts that were encoded a second time, as a whole (`encoding/self_check.py`)."""

from typing import Any

from gateway.metrics import GatewayMetrics


class SelfChecks:
    """Counts for `/fleet` and metrics."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._checked = self._different = 0

    def match(self) -> None:
        """Ids from pieces were those of the whole text."""
        self._checked += 1
        self._metrics.parity.labels("self_check", "match").inc()

    def mismatch(self) -> None:
        """They weren't: the tokenizer's texts are taken less far apart from now on."""
        self._checked += 1
        self._different += 1
        self._metrics.parity.labels("self_check", "mismatch").inc()
        self._metrics.degraded.labels("tokenizer_cache").inc()

    def row(self) -> dict[str, Any]:
        """For `/fleet`."""
        return {"texts": self._checked, "texts_different": self._different}
