"""Text out of tokens, one at a time: whole characters only, and nothing at or behind a stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of generated tokens into text that can be sent.

    Bytes of an unfinished character wait for the rest. With stop strings, text that may be the beginning of one waits
    too; a stop string found ends the text before it.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def push(self, token_bytes: bytes) -> str:
        """Text that is certain after this token. Once `is_stopped`, nothing more comes."""
        return self._release(self._decoder.decode(token_bytes), is_last=False)

    def finish(self) -> str:
        """What was still held back; bytes that never became a character are replaced."""
        return self._release(self._decoder.decode(b"", final=True), is_last=True)

    def _release(self, text: str, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        held = self._held + text
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return held[: min(found)]
        keep = 0 if is_last else self._possible_stop_length(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def _possible_stop_length(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
