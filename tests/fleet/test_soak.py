"""A short soak of a gateway (`python -m bench.gateway_soak` is the long one)."""

from bench.gateway_soak import ENDINGS, left_over, soak

REQUESTS = 2_400


async def test_nothing_is_left_of_requests_of_every_ending() -> None:
    looks = await soak(REQUESTS)
    assert left_over(looks) == []
    seen = looks[-1].seen
    assert {what.partition(":")[0] for what in seen} == set(ENDINGS)
    assert seen["whole: 200"] > 0
    assert seen["streamed: 200"] > 0
