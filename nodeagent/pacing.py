"""How a fleet of writers stays gentle: how long a walk rests between batches, and how far apart lives begin."""

REST_S = 0.004
REST_MAX_S = 0.25
NEW_LIFE_MIN_S = 5.0
NEW_LIFE_MAX_S = 60.0


def rest_s(round_trip_s: float) -> float:
    """How long a walk rests after a batch: `round_trip_s` squared by `REST_S`, at most `REST_MAX_S`.

    A round trip is mostly the queue in front of the server, and a lookup waits in the same. With N walkers that rest
    k round trips each, the queue is N / (1 + k) batches long: a fixed k does too little for many and too much for few.
    In proportion to the round trip itself it settles where r + r * r / REST_S is the time of N batches, at about the
    square root of N: for 64 walkers and 0.4 ms a batch at 9 ms instead of 27. The server is kept busy all the same.
    A smaller `REST_S` makes the queue shorter, and walks slow wherever round trips are long for other reasons.
    """
    return min(round_trip_s * round_trip_s / REST_S, REST_MAX_S)


class LifeSpacing:
    """When another life may begin: `NEW_LIFE_MIN_S` after the last one, and up to `NEW_LIFE_MAX_S` while they go on.

    A server that loses something all the time would else be given the whole inventory all the time.
    """

    def __init__(self) -> None:
        self.next_at = float("-inf")
        self._begun_at = float("-inf")
        self._gap_s = NEW_LIFE_MIN_S

    def note_begun(self, now: float) -> None:
        """A life has begun."""
        follows = now - self._begun_at < 2 * self._gap_s
        self._gap_s = min(2 * self._gap_s, NEW_LIFE_MAX_S) if follows else NEW_LIFE_MIN_S
        self._begun_at, self.next_at = now, now + self._gap_s
