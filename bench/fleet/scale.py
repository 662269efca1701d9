"""Smaller tokens and faster seconds: how the simulated fleet is scaled to what a small machine can carry.

One token of a bench prompt stands for `trace_tokens` of the trace, and one second of the trace takes `real_s` on the
clock. What engines take is computed for the trace's tokens and seconds, then scaled. A router meets engines that are
just as they would be with these prompts: their shape and speed are told in bench tokens and real seconds.
"""

from dataclasses import dataclass

from directory.costs import ModelShape
from warmroute.replay.hardware import Model
from warmroute.replay.trace import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Scale:
    """`trace_tokens`: trace tokens a bench token; `real_s`: real seconds a second of the trace."""

    trace_tokens: int = 8
    real_s: float = 0.2

    @property
    def block_tokens(self) -> int:
        """Bench tokens of one of the trace's blocks: the engines' block size, and the chunk of their registrations."""
        return BLOCK_TOKENS // self.trace_tokens

    def shape(self, model: Model) -> ModelShape:
        """The model that costs as much for bench tokens as `model` does for the trace's.

        The linear part of a prefill grows with tokens and the quadratic with their square, so width is multiplied by
        the scale where parameters aren't; FLOP/s are divided by what is left (`flops`).
        """
        shape, tokens = model.shape, self.trace_tokens
        return ModelShape(shape.parameters, shape.layers, shape.d_model * tokens, shape.kv_bytes_per_token * tokens)

    def flops(self, model: Model) -> float:
        """Useful FLOP/s, in bench tokens and real seconds, of the engine with `shape(model)`."""
        return model.flops / (self.trace_tokens * self.real_s)
