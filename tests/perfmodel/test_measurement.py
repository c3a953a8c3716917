"""Profiles are the same after they were written and read, and errors name bad lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.core import BatchShape
from slosched.perfmodel import Measurement, Profile, read_profile, write_profile
from slosched.perfmodel.graphs import graphs_of
from slosched.perfmodel.measurement import (
    MeasurementError,
    append_measurement,
    format_chunks,
    parse_chunks,
)

HEADER = "batch,num_swapped_blocks,seconds,repeats,spread_s"

chunk_lists = st.lists(
    st.tuples(st.integers(1, 4096), st.integers(0, 20_000)), min_size=1, max_size=8
)


def test_a_profile_survives_a_file(tmp_path: Path) -> None:
    profile = Profile(
        (
            Measurement(((512, 1024), *((1, 300),) * 8, (1, 7)), 0.0123, repeats=5, spread_s=1e-4),
            Measurement((), 0.5, num_swapped_blocks=12),
        ),
        {"gpu": "a GPU", "note": 'says "quoted", and so on\nin two lines'},
    )
    path = tmp_path / "profile.csv"
    write_profile(profile, path)
    assert read_profile(path) == profile
    more = Measurement(((3, 0),), 0.25, repeats=2)
    append_measurement(more, path)
    assert read_profile(path) == Profile((*profile.measurements, more), profile.provenance)


@given(chunk_lists)
def test_chunks_survive_their_text(chunks: list[tuple[int, int]]) -> None:
    assert parse_chunks(format_chunks(chunks)) == tuple(chunks)


def test_equal_neighbours_are_counted() -> None:
    assert format_chunks([(512, 1024), (1, 300), (1, 300), (1, 9)]) == "512@1024 1@300x2 1@9"


def test_a_file_from_elsewhere_needs_only_two_columns(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    path.write_text("seconds,batch\n0.5,16@0\n")
    assert read_profile(path) == Profile((Measurement(((16, 0),), 0.5),))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(
        '# slosched profile {"gpu": "mine"}\r\nbatch,seconds\r\n16@0,0.5\r\n', "utf-8-sig"
    )
    assert read_profile(path) == Profile((Measurement(((16, 0),), 0.5),), {"gpu": "mine"})


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("16,0,0.1,1,0", "'16' is not a chunk"),
        ("16@,0,0.1,1,0", "'16@' is not a chunk"),
        ("-1@0,0,0.1,1,0", "'-1@0' is not a chunk"),
        ("0@5,0,0.1,1,0", "'0@5' is not a chunk"),
        ("1@5x,0,0.1,1,0", "'1@5x' is not a chunk"),
        ("1@5 nonsense,0,0.1,1,0", "'nonsense' is not a chunk"),
        (",0,0.1,1,0", "the batch is empty"),
        ("1@5,0,fast,1,0", "fast"),
        ("1@5,0,,1,0", "'' is not a positive time"),
        ("1@5,0,0,1,0", "'0' is not a positive time"),
        ("1@5,0,-0.1,1,0", "'-0.1' is not a positive time"),
        ("1@5,0,nan,1,0", "'nan' is not a positive time"),
        ("1@5,0,inf,1,0", "'inf' is not a positive time"),
        ("1@5,many,0.1,1,0", "many"),
        ("1@5,-2,0.1,1,0", "-2 blocks cannot be swapped"),
        ("1@5,0,0.1,often,0", "often"),
        ("1@5,0,0.1,0,0", "repeats must be at least 1, not 0"),
        ("1@5,0,0.1,1,wide", "wide"),
        ("1@5,0,0.1,1,nan", "spread_s must be a time of 0 or more, not 'nan'"),
        ("1@5,0,0.1,1,-0.1", "spread_s must be a time of 0 or more, not '-0.1'"),
        ("1@5", "it has 1 values, not 5: '1@5'"),
        ("1@5,0,0.1", "it has 3 values, not 5: '1@5,0,0.1'; if it was cut off, remove the line"),
        ("1@5,0,0,1,1,0", "it has 6 values, not 5: '1@5,0,0,1,1,0'"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, row: str, what: str) -> None:
    """Blank lines before and after the row do not change its line number."""
    path = tmp_path / "mine.csv"
    path.write_text(f"# slosched profile {{}}\n{HEADER}\n\n1@5,0,0.1,1,0\n{row}\n\n1@5,0,0.1,1,0\n")
    with pytest.raises(MeasurementError, match=r"mine\.csv, line 5") as caught:
        read_profile(path)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("part", "reference", "what"),
    [
        ("heads", "0", "'heads' is not a valid Part"),
        ("step", "nan", "reference_s must be a time of 0 or more, not 'nan'"),
        ("step", "-1", "reference_s must be a time of 0 or more, not '-1'"),
        ("step", "slow", "slow"),
    ],
)
def test_so_is_one_of_the_columns_that_few_files_have(
    tmp_path: Path, part: str, reference: str, what: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"batch,seconds,part,reference_s\n1@5,0.1,{part},{reference}\n")
    with pytest.raises(MeasurementError, match=r"mine\.csv, line 2") as caught:
        read_profile(path)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no column batch and no column seconds"),
        ("tokens,time\n1,2\n", "it has no column batch and no column seconds"),
        (f"{HEADER}\n", "holds no measurement"),
        ("# slosched profile {gpu}\n" + HEADER, "line 1: the provenance is not JSON"),
        ("# slosched profile 3\n" + HEADER, "line 1: the provenance is not JSON"),
    ],
)
def test_a_file_that_is_no_profile_says_why(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(MeasurementError, match=message):
        read_profile(path)


def test_facts_that_were_written_as_numbers_are_read_as_text(tmp_path: Path) -> None:
    """Who adds a fact to the first line of a profile by hand writes a number as a number."""
    path = tmp_path / "mine.csv"
    facts = '{"num_experts": 8, "graph_sizes": 512, "gpu": null, "model": "mine"}'
    path.write_text(f"# slosched profile {facts}\n{HEADER}\n1@5,0,0.1,1,0\n")
    profile = read_profile(path)
    assert profile.provenance == {"num_experts": "8", "graph_sizes": "512", "model": "mine"}
    assert graphs_of(profile.provenance).sizes == (512,)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00binary"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mine.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MeasurementError, match=r"cannot read the profile .*mine\.csv"):
        read_profile(path)


@pytest.mark.parametrize(
    ("measurement", "regime"),
    [
        (Measurement(((1, 5), (1, 9)), 0.1), "decode"),
        (Measurement(((16, 0), (2, 3)), 0.1), "prefill"),
        (Measurement(((16, 0), (1, 9)), 0.1), "mixed"),
        (Measurement(((1, 9),), 0.1, num_swapped_blocks=1), "swap"),
    ],
)
def test_every_step_belongs_to_one_regime(measurement: Measurement, regime: str) -> None:
    assert measurement.regime == regime


def test_a_measurement_has_the_shape_of_its_chunks() -> None:
    expected = BatchShape()
    expected.add(16, 4)
    expected.add(1, 9)
    expected.num_swapped_blocks = 3
    assert Measurement(((16, 4), (1, 9)), 0.1, num_swapped_blocks=3).shape == expected
