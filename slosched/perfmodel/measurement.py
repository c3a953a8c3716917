"""Measured steps: what was in each batch and how long it took, read from and written to CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from slosched.append_line import append_line
from slosched.core import BatchShape, SloschedError
from slosched.perfmodel.server_time import NO_SERVER_TIME, ServerTime

Chunk = tuple[int, int]
"""(tokens computed in the step, tokens already in the KV cache) of one request."""

_HEADER = "# slosched profile "
_SERVER = "# slosched server "
"""The line that holds what the server added to the steps; of several lines the last one counts."""
_COLUMNS = ("batch", "num_swapped_blocks", "seconds", "repeats", "spread_s", "part", "reference_s")


class MeasurementError(SloschedError):
    """A file of measurements cannot be read."""


class Part(StrEnum):
    """The part of a step that a measurement timed."""

    STEP = "step"
    """The whole step, as a server sees it."""
    LAYERS = "layers"
    """All of the step except attention, as profilers of single operators measure it."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One batch, and the median time of its repeats."""

    chunks: tuple[Chunk, ...]
    seconds: float
    num_swapped_blocks: int = 0
    repeats: int = 1
    spread_s: float = 0.0
    """Half the distance between the 25th and the 75th percentile of the repeats."""
    part: Part = Part.STEP
    reference_s: float = 0.0
    """The time that a fixed reference batch took around then; 0 if it was not measured."""

    @property
    def shape(self) -> BatchShape:
        shape = BatchShape()
        for num_new_tokens, num_prior_tokens in self.chunks:
            shape.add(num_new_tokens, num_prior_tokens)
        shape.num_swapped_blocks = self.num_swapped_blocks
        return shape

    @property
    def regime(self) -> str:
        """Return `decode`, `prefill`, `mixed` or `swap`, the kind of step for error reports."""
        if self.num_swapped_blocks:
            return "swap"
        shape = self.shape
        if not shape.num_prefills:
            return "decode"
        return "mixed" if shape.num_decodes else "prefill"


@dataclass(frozen=True)
class Profile:
    """Measurements of one device, model and engine, with their provenance."""

    measurements: tuple[Measurement, ...]
    provenance: Mapping[str, str] = field(default_factory=dict)
    server_time: ServerTime = NO_SERVER_TIME
    """What the server added, where that was measured; the steps leave it out."""

    @property
    def has_single_steps(self) -> bool:
        """Tell whether the rows show how single steps scatter, and not only what a table says."""
        batches = {(m.chunks, m.num_swapped_blocks, m.part) for m in self.measurements}
        is_recorded = "recorded" in self.provenance.get("method", "")
        return is_recorded or len(batches) < len(self.measurements)

    def merged(self) -> Profile:
        """Return one measurement of each batch: the median of its rows, corrected for drift.

        Where rows say how fast the machine was (`reference_s`), each time is scaled to what it
        would have been at the machine's median speed.
        """
        references = [m.reference_s for m in self.measurements if m.reference_s]
        usual_s = statistics.median(references) if references else 0.0
        groups: dict[object, list[Measurement]] = {}
        for m in self.measurements:
            groups.setdefault((m.chunks, m.num_swapped_blocks, m.part), []).append(m)
        merged = tuple(_merge(rows, usual_s) for rows in groups.values())
        return replace(self, measurements=merged)


def _merge(rows: Sequence[Measurement], usual_s: float) -> Measurement:
    seconds = [m.seconds * (usual_s / m.reference_s if m.reference_s else 1.0) for m in rows]
    if len(rows) == 1:
        return replace(rows[0], seconds=seconds[0], reference_s=0.0)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return replace(
        rows[0],
        seconds=statistics.median(seconds),
        repeats=sum(m.repeats for m in rows),
        spread_s=(high - low) / 2,
        reference_s=0.0,
    )


def format_chunks(chunks: Sequence[Chunk]) -> str:
    """Format chunks as new@prior tokens with equal neighbours counted: `512@1024 1@300x8`."""
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
        file.write(f"{_HEADER}{json.dumps(dict(profile.provenance))}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows(_row(measurement) for measurement in profile.measurements)


def append_measurement(measurement: Measurement, path: Path) -> None:
    """Add one row to a file that `write_profile` began, so that a long run loses nothing."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(_row(measurement))
    append_line(path, line.getvalue())


def append_server_time(server_time: ServerTime, path: Path) -> None:
    """Add what the server added to the steps of a file that `write_profile` began."""
    append_line(path, f"{_SERVER}{json.dumps(asdict(server_time))}\n")


def read_profile(path: Path, *, may_be_empty: bool = False) -> Profile:
    """Read a profile that `write_profile` wrote.

    Raises MeasurementError, with file and line, if a row makes no sense.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MeasurementError(f"cannot read the profile {path}: {reason}") from error
    provenance = _parse_header(lines[0], path) if lines else {}
    kept = [
        i
        for i, line in enumerate(lines, start=1)
        if line and not line.startswith((_HEADER, _SERVER))
    ]
    rows = csv.DictReader(lines[i - 1] for i in kept)
    missing = [name for name in ("batch", "seconds") if name not in (rows.fieldnames or ())]
    if missing:
        raise MeasurementError(
            f"{path} is not a profile: it has no column {' and no column '.join(missing)}; "
            "make one with `slosched profile`"
        )
    measurements = []
    for row in rows:
        try:
            _check_length(row)
            measurements.append(_parse_row(row))
        except (TypeError, ValueError) as error:
            raise MeasurementError(f"{path}, line {kept[rows.line_num - 1]}: {error}") from error
    if not (measurements or may_be_empty):
        raise MeasurementError(f"the profile {path} holds no measurement")
    return Profile(tuple(measurements), provenance, _parse_server_time(lines, path))


def _parse_server_time(lines: Sequence[str], path: Path) -> ServerTime:
    found = NO_SERVER_TIME
    for number, line in enumerate(lines, start=1):
        if line.startswith(_SERVER):
            try:
                found = ServerTime(**json.loads(line.removeprefix(_SERVER)))
            except (TypeError, ValueError) as error:
                raise MeasurementError(f"{path}, line {number}: {error}") from error
    return found


def _parse_header(line: str, path: Path) -> dict[str, str]:
    if not line.startswith(_HEADER):
        return {}
    try:
        facts = dict(json.loads(line.removeprefix(_HEADER)))
    except (TypeError, ValueError) as error:
        raise MeasurementError(f"{path}, line 1: the provenance is not JSON: {error}") from error
    return {
        name: fact if isinstance(fact, str) else json.dumps(fact)  # by hand, one writes numbers
        for name, fact in facts.items()
        if fact is not None
    }


def _row(measurement: Measurement) -> tuple[str | int, ...]:
    return (
        format_chunks(measurement.chunks),
        measurement.num_swapped_blocks,
        f"{measurement.seconds:.9f}",
        measurement.repeats,
        f"{measurement.spread_s:.9f}",
        measurement.part.value,
        f"{measurement.reference_s:.9f}",
    )


def _check_length(row: Mapping[str | None, object]) -> None:
    """Raise ValueError if a row of `csv.DictReader` has another number of values than the header.

    A row that was cut off, or a decimal comma, could otherwise pass for another time.
    """
    num_columns = len(row) - (None in row)
    values = [value for value in row.values() if isinstance(value, str)]
    values += more if isinstance(more := row.get(None), list) else []
    if len(values) != num_columns:
        advice = "; if it was cut off, remove the line" if len(values) < num_columns else ""
        count = f"it has {len(values)} values, not {num_columns}"
        raise ValueError(f"{count}: {','.join(values)!r}{advice}")


def _parse_row(row: Mapping[str, str | None]) -> Measurement:
    measurement = Measurement(
        chunks=parse_chunks(row["batch"] or ""),
        seconds=float(row["seconds"] or "nan"),
        num_swapped_blocks=int(row.get("num_swapped_blocks") or 0),
        repeats=int(row.get("repeats") or 1),
        spread_s=float(row.get("spread_s") or 0.0),
        part=Part(row.get("part") or Part.STEP),
        reference_s=float(row.get("reference_s") or 0.0),
    )
    if not 0 < measurement.seconds < math.inf:
        raise ValueError(f"{row['seconds']!r} is not a positive time in seconds")
    if measurement.num_swapped_blocks < 0:
        raise ValueError(f"{measurement.num_swapped_blocks} blocks cannot be swapped")
    if measurement.repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {measurement.repeats}")
    for name in ("spread_s", "reference_s"):
        if not 0 <= getattr(measurement, name) < math.inf:
            raise ValueError(f"{name} must be a time of 0 or more, not {row[name]!r}")
    if not (measurement.chunks or measurement.num_swapped_blocks):
        raise ValueError("the batch is empty")
    return measurement
