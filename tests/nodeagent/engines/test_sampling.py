from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.engines.reference.sampling import Sampler, SamplingSettings

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def picks(settings: SamplingSettings, count: int = 4000) -> Counter[int]:
    sampler = Sampler(settings)
    return Counter(sampler.pick(LOGITS) for _ in range(count))


def test_temperature_zero_takes_the_likeliest_and_the_first_of_equals() -> None:
    greedy = Sampler(SamplingSettings(temperature=0.0))
    assert greedy.pick(LOGITS) == 0
    assert greedy.pick(np.array([1.0, 2.0, 2.0], np.float32)) == 1


def test_a_seed_gives_the_same_picks_again_and_another_seed_others() -> None:
    def sequence(seed: int) -> list[int]:
        sampler = Sampler(SamplingSettings(seed=seed))
        return [sampler.pick(LOGITS) for _ in range(50)]

    assert sequence(7) == sequence(7) != sequence(8)


def test_picks_follow_the_probabilities() -> None:
    counts = picks(SamplingSettings(seed=1))
    for token, share in enumerate([0.5, 0.3, 0.15, 0.05]):
        assert abs(counts[token] / 4000 - share) < 0.04


def test_a_low_temperature_sharpens() -> None:
    assert picks(SamplingSettings(temperature=0.2, seed=1))[0] > 3600


def test_top_p_keeps_the_smallest_set_with_that_probability() -> None:
    assert picks(SamplingSettings(top_p=0.79, seed=1)).keys() == {0, 1}
    assert picks(SamplingSettings(top_p=0.81, seed=1)).keys() == {0, 1, 2}
    assert picks(SamplingSettings(top_p=1e-9, seed=1)).keys() == {0}


@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
    temperature=st.floats(1e-5, 2.0),
    top_p=st.floats(1e-6, 1.0),
)
def test_any_logits_give_a_token_of_the_vocabulary(logits: list[float], temperature: float, top_p: float) -> None:
    token = Sampler(SamplingSettings(temperature, top_p, seed=0)).pick(np.array(logits, np.float32))
    assert 0 <= token < len(logits)
