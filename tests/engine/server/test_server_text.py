"""Text comes out in whole characters and stops where it should."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.engine.server import ByteTokenizer
from slosched.engine.server.stop_strings import StopStrings
from slosched.engine.server.text import Detokenizer, text_behind

TOKENIZER = ByteTokenizer()


@given(st.text(max_size=200))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER.decode)
    ids = TOKENIZER.encode(text)
    clean = TOKENIZER.decode(ids)  # without half surrogate pairs
    so_far = ""
    for i, token_id in enumerate(ids):
        so_far += detokenizer.add(token_id)
        assert clean.startswith(so_far)
        if "\ufffd" not in clean:
            # At most one incomplete character may be held back.
            assert so_far == bytes(ids[: i + 1]).decode(errors="ignore")
    assert so_far + detokenizer.flush() == clean


@given(st.binary(max_size=300))
def test_bytes_that_are_no_text_come_out_as_the_decoder_has_them(data: bytes) -> None:
    detokenizer = Detokenizer(TOKENIZER.decode)
    pieces = [detokenizer.add(byte) for byte in data]
    # The window may move within invalid bytes, so only complete characters are certain.
    joined = "".join(pieces) + detokenizer.flush()
    assert joined.replace("\ufffd", "") == data.decode(errors="replace").replace("\ufffd", "")


def test_work_per_token_is_bounded() -> None:
    longest = 0

    def decode(ids: object) -> str:
        nonlocal longest
        longest = max(longest, len(list(ids)))  # type: ignore[call-overload]
        return TOKENIZER.decode(list(ids))  # type: ignore[call-overload]

    for data in (b"plain text " * 100, b"\x80" * 1000, b"\xe2" * 1000, b"\xff\xf0" * 500):
        detokenizer = Detokenizer(decode)
        for byte in data:
            detokenizer.add(byte)
    assert longest <= 65


def test_a_word_piece_decoder_keeps_the_spaces_between_words() -> None:
    """Such decoders drop the space in front of the first word that they get."""
    words = [f"▁w{i}" for i in range(100)]
    detokenizer = Detokenizer(lambda ids: "".join(words[i] for i in ids).replace("▁", " ")[1:])
    pieces = [detokenizer.add(i) for i in range(100)]
    assert "".join(pieces) == " ".join(f"w{i}" for i in range(100))


@given(st.text(max_size=20), st.text(max_size=20))
def test_behind_a_prompt_comes_the_text_that_is_added_to_it(prompt: str, text: str) -> None:
    before, ids = TOKENIZER.encode(prompt), TOKENIZER.encode(text)
    detokenizer = Detokenizer(TOKENIZER.decode, before)
    joined = "".join(map(detokenizer.add, ids)) + detokenizer.flush()
    assert joined == text_behind(before, ids, TOKENIZER.decode) == TOKENIZER.decode(ids)


def test_a_prompt_that_ends_within_a_character_has_the_beginning_of_it() -> None:
    before, after = [0x41, 0xF0, 0x9F], [0x99, 0x82, 0x42]
    detokenizer = Detokenizer(TOKENIZER.decode, before)
    joined = "".join(map(detokenizer.add, after)) + detokenizer.flush()
    assert joined == text_behind(before, after, TOKENIZER.decode) == "\ufffd\ufffdB"


def until_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text cut before the stop string that is complete first: the definition."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_stop_strings_do_not_depend_on_the_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    filter_ = StopStrings(stops)
    shown = ""
    for start, end in pairwise(bounds):
        shown += filter_.push(text[start:end])
        if filter_.found:
            break
    else:
        shown += filter_.flush()
    assert (shown, filter_.found) == until_stop(text, stops)


def test_the_stop_string_is_shown_to_who_wants_it() -> None:
    filter_ = StopStrings(["bc", "bcd", "zz"], is_shown=True)
    assert filter_.push("ab") + filter_.push("cde") == "abc"
    assert filter_.found


def test_long_stop_strings_cost_a_long_text_linear_time() -> None:
    """Each character but the last of each stop string fits, all the time."""
    stops = ["a" * 511 + chr(ord("b") + i) for i in range(16)]
    filter_ = StopStrings(stops)
    shown = "".join(filter_.push("a" * 40) for _ in range(5000))
    assert len(shown) == 200_000 - 511
    assert filter_.push("z") == "a" * 511 + "z"


@pytest.mark.parametrize("prompt", ["héllo wörld", "naïve 🙂 emoji 👩‍🚀", "plain"])
def test_byte_tokenizer_there_and_back(prompt: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(prompt)) == prompt
