"""What is known of how prompts begin gives the ids of the whole texts, whatever follows or is forgotten."""

import random
from collections.abc import Iterator
from itertools import accumulate

import pytest

from bench.encoding import fuzz
from directory.chunks import pack_tokens
from gateway.encoding.cuts import Cutter, CutterEverywhere
from gateway.encoding.known_openings import KnownOpenings
from gateway.encoding.nasty_texts import nasty_texts
from gateway.encoding.piece_encoder import Depth, PieceEncoder
from tests.gateway.pipelines import PIPELINES, family, smollm2_content

BLOCK_CHARS = 16
CONVERSATIONS, TURNS = 12, 6
AMPLE_BYTES, SCARCE_BYTES = 2**22, 2**18


def conversations(tokenizer: fuzz.Tokenizer, seed: int) -> Iterator[str]:
    """Prompts that grow turn by turn, branch off, and take turns with each other."""
    choose = random.Random(seed)
    texts = list(nasty_texts(tokenizer.added_tokens(), CONVERSATIONS * TURNS, seed))
    openings = [""]
    for text in texts:
        base = choose.choice(openings)
        prompt = base[: choose.randint(0, len(base))] if choose.random() < 0.3 else base
        prompt += "\n\nAnd then a line\n" + text
        openings.append(prompt)
        yield prompt


@pytest.mark.parametrize("cache_bytes", [AMPLE_BYTES, SCARCE_BYTES])
@pytest.mark.parametrize("name", PIPELINES)
def test_growing_and_branching_prompts_have_the_ids_of_the_whole_texts(name: str, cache_bytes: int) -> None:
    tokenizer = family(name)
    known_chars = 0
    cutters = CutterEverywhere(tokenizer.rules, 0), Cutter(tokenizer.rules, BLOCK_CHARS, 4 * BLOCK_CHARS)
    for cutter in cutters:
        encoder = PieceEncoder(
            tokenizer.pipeline, cutter, tokenizer.whole, tokenizer.rest, cache_bytes, block_chars=BLOCK_CHARS
        )
        encoder.depth = Depth.PIECES
        for prompt in conversations(tokenizer, seed=3):
            known_chars += encoder.recall(prompt).place
            assert encoder.encode(prompt) == tokenizer.reference.encode(prompt), prompt
            assert encoder.cache_bytes <= cache_bytes * 1.1
    if cache_bytes == AMPLE_BYTES:
        assert (known_chars > 0) == tokenizer.rules.between_tokens


def test_a_text_that_was_learned_behind_a_requests_back_is_known_from_its_beginning() -> None:
    tokenizer = fuzz.load("smollm2", smollm2_content())
    encoder = tokenizer.encoder(AMPLE_BYTES)
    choose = random.Random(5)
    text = "\n".join(f"Line {choose.random()} of a document" for _ in range(2000))
    new = encoder.encode_at_once(text)
    encoder.keep(new, encoder.take_apart(new) or ())
    assert encoder.recall(text).place > len(text) * 0.9
    assert encoder.encode(text) == tokenizer.reference.encode(text)


def test_after_a_flush_nothing_is_known_and_what_was_on_its_way_is_not_learned() -> None:
    tokenizer = family("cl100k")
    encoder = tokenizer.encoder(AMPLE_BYTES)
    text = "\n".join(f"Line {number} of a document" for number in range(2000))
    partial = encoder.look_up(text)
    encoder.flush()
    encoder.join(partial, encoder.encode_missing(partial), False)
    assert encoder.recall(text).place == 0


def stretches(text: str, size: int) -> list[tuple[int, bytes]]:
    """Pieces of `size` characters, but for the last one, with their bytes as ids."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    ids = (pack_tokens(list(piece.encode())) for piece in pieces)
    return list(zip(accumulate(map(len, pieces[:-1])), ids, strict=False))


def ids_of(known: KnownOpenings, text: str) -> bytes:
    return b"".join(known.find(text).parts)


def test_what_is_known_ends_at_a_place_whose_next_character_is_known_as_well() -> None:
    known = KnownOpenings(AMPLE_BYTES, block_chars=10)
    text = "abcdefghijklmnopqrstuvwxyz0123456789"
    known.nothing().go_on(text, stretches(text, 5))
    assert [known.find(text[:10] + "!" * 20).place, known.find(text).place] == [5, 25]
    assert ids_of(known, text) == pack_tokens(list(text[:25].encode()))


def test_an_opening_that_was_cut_otherwise_is_left_as_it_is() -> None:
    known = KnownOpenings(AMPLE_BYTES, block_chars=10)
    text = "abcdefghijklmnopqrstuvwxyz0123456789"
    known.nothing().go_on(text[:20], stretches(text[:20], 7))
    known.nothing().go_on(text, stretches(text, 4))
    opening = known.find(text)
    assert b"".join(opening.parts) == pack_tokens(list(text[: opening.place].encode()))


def test_what_is_asked_for_stays_and_the_rest_is_forgotten() -> None:
    known = KnownOpenings(20_000, block_chars=10)
    texts = [f"{number:04d} is how this one begins, and so on and so on" for number in range(400)]
    for text in texts:
        known.nothing().go_on(text, stretches(text, 5))
        known.find(texts[0]).go_on(texts[0], ())
        assert known.bytes_used <= 22_000
    assert known.find(texts[0]).place > 0
    assert known.find(texts[1]).place == 0
    assert ids_of(known, texts[0]) == pack_tokens(list(texts[0][: known.find(texts[0]).place].encode()))
