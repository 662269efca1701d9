"""Values that many rows share, kept once: a row holds a number of four bytes.

Numbers of values that no row has any more are given out again, so that rows which come and go, each with a value of
its own, take no more memory than rows which stay.
"""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value", bound=Hashable)


class Interned(Generic[Value]):
    """Values by number, for as long as they are in use."""

    def __init__(self) -> None:
        self._numbers: dict[Value, int] = {}
        self._values: list[Value | None] = []
        self._uses: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, value: Value) -> int:
        """The number of a value, which is used once more."""
        number = self._numbers.get(value)
        if number is None:
            if self._free:
                number = self._free.pop()
            else:
                number = len(self._values)
                self._values.append(None)
                self._uses.append(0)
            self._numbers[value], self._values[number] = number, value
        self._uses[number] += 1
        return number

    def give_back(self, number: int) -> None:
        """A value is used once less."""
        self._uses[number] -= 1
        if not self._uses[number]:
            value, self._values[number] = self._values[number], None
            assert value is not None, "a number in use has its value"
            del self._numbers[value]
            self._free.append(number)

    def value(self, number: int) -> Value:
        """The value of a number that is in use."""
        value = self._values[number]
        assert value is not None, "only numbers in use are asked for"
        return value

    def items(self) -> Iterator[tuple[Value, int]]:
        """All values in use, and their numbers."""
        return iter(self._numbers.items())
