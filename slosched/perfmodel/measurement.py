"""Measured steps: what was in the batch, and how long it took.  Read from and written to CSV."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slosched.core import BatchShape, SloschedError

Chunk = tuple[int, int]
"""(tokens computed in the step, tokens already in the KV cache) of one request."""

_COLUMNS = ("batch", "num_swapped_blocks", "seconds", "repeats", "spread_s")


class MeasurementError(SloschedError):
    """A file of measurements cannot be read."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One batch and the median time of its repeats."""

    chunks: tuple[Chunk, ...]
    seconds: float
    num_swapped_blocks: int = 0
    repeats: int = 1
    spread_s: float = 0.0
    """Half the range between the 25th and the 75th percentile of the repeats."""

    @property
    def shape(self) -> BatchShape:
        shape = BatchShape()
        for num_new_tokens, num_prior_tokens in self.chunks:
            shape.add(num_new_tokens, num_prior_tokens)
        shape.num_swapped_blocks = self.num_swapped_blocks
        return shape

    @property
    def regime(self) -> str:
        """`decode`, `prefill`, `mixed` or `swap`: errors are reported for each on its own."""
        if self.num_swapped_blocks:
            return "swap"
        shape = self.shape
        if not shape.num_prefills:
            return "decode"
        return "mixed" if shape.num_decodes else "prefill"


@dataclass(frozen=True)
class Profile:
    """Measurements of one device, model and engine, with where they come from."""

    measurements: tuple[Measurement, ...]
    provenance: Mapping[str, str] = field(default_factory=dict)


def format_chunks(chunks: Sequence[Chunk]) -> str:
    """`512@1024 1@300x8`: chunks of new@prior tokens, equal neighbours counted."""
    words: list[str] = []
    i = 0
    while i < len(chunks):
        j = i
        while j < len(chunks) and chunks[j] == chunks[i]:
            j += 1
        new, prior = chunks[i]
        words.append(f"{new}@{prior}" + (f"x{j - i}" if j - i > 1 else ""))
        i = j
    return " ".join(words)


def parse_chunks(text: str) -> tuple[Chunk, ...]:
    chunks: list[Chunk] = []
    for word in text.split():
        match = re.fullmatch(r"(\d+)@(\d+)(?:x(\d+))?", word)
        if match is None or int(match[1]) < 1:
            raise ValueError(f"{word!r} is not a chunk; write new@prior, as in 512@0 or 1@300x8")
        chunks += [(int(match[1]), int(match[2]))] * int(match[3] or 1)
    return tuple(chunks)


def write_profile(profile: Profile, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# slosched profile {json.dumps(dict(profile.provenance))}\n")
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows(_row(measurement) for measurement in profile.measurements)


def append_measurement(measurement: Measurement, path: Path) -> None:
    """Add one row to a file that `write_profile` began, so that a long run loses nothing."""
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(_row(measurement))


def read_profile(path: Path) -> Profile:
    """Raises MeasurementError with file and line if a row makes no sense."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise MeasurementError(f"cannot read the profile {path}: {error.strerror}") from error
    provenance: dict[str, str] = {}
    if lines and lines[0].startswith("# slosched profile "):
        provenance = json.loads(lines[0].removeprefix("# slosched profile "))
        lines[0] = ""
    rows = csv.DictReader(line for line in lines if line)
    if rows.fieldnames is None or not {"batch", "seconds"} <= set(rows.fieldnames):
        raise MeasurementError(
            f"{path} is not a profile: it needs the columns {', '.join(_COLUMNS)}; "
            "make one with `slosched profile`"
        )
    blank = sum(not line for line in lines)
    measurements = tuple(_parse_rows(rows, path, blank))
    if not measurements:
        raise MeasurementError(f"the profile {path} holds no measurement")
    return Profile(measurements, provenance)


def _row(measurement: Measurement) -> tuple[str, int, str, int, str]:
    return (
        format_chunks(measurement.chunks),
        measurement.num_swapped_blocks,
        f"{measurement.seconds:.9f}",
        measurement.repeats,
        f"{measurement.spread_s:.9f}",
    )


def _parse_rows(rows: csv.DictReader[str], path: Path, skipped_lines: int) -> Iterable[Measurement]:
    for row in rows:
        try:
            measurement = Measurement(
                chunks=parse_chunks(row["batch"]),
                seconds=float(row["seconds"]),
                num_swapped_blocks=int(row.get("num_swapped_blocks") or 0),
                repeats=int(row.get("repeats") or 1),
                spread_s=float(row.get("spread_s") or 0.0),
            )
            if not measurement.seconds > 0:
                raise ValueError(f"{row['seconds']!r} is not a positive time in seconds")
        except (TypeError, ValueError) as error:
            line = rows.line_num + skipped_lines
            raise MeasurementError(f"{path}, line {line}: {error}") from error
        yield measurement
