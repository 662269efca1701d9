"""How fast the engine computes, in the arithmetic of `directory.costs`: useful FLOP/s, smoothed over real prefills."""

from directory.costs import ModelShape, Rates, prefill_s

_SMOOTHING = 0.1
_TOKENS_MIN = 16
_UNIT = Rates(flops=1.0)


class Speedometer:
    """Observed FLOP/s. One writer; readers may see the value before the last."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._flops = 0.0

    @property
    def flops(self) -> float:
        """Useful FLOP/s; 0 before the first observation."""
        return self._flops

    def prefill_s(self, end_tokens: int, start_tokens: int) -> float:
        """Expected seconds of a prefill from `start_tokens` to `end_tokens`; 0 before the first observation."""
        return prefill_s(self._shape, Rates(self._flops), end_tokens, start_tokens) if self._flops else 0.0

    def observe(self, end_tokens: int, start_tokens: int, seconds: float) -> None:
        """A prefill from `start_tokens` to `end_tokens` took that long. Tiny ones, all overhead, don't count."""
        if end_tokens - start_tokens < _TOKENS_MIN or seconds <= 0:
            return
        observed = prefill_s(self._shape, _UNIT, end_tokens, start_tokens) / seconds
        self._flops = observed if not self._flops else self._flops + _SMOOTHING * (observed - self._flops)
