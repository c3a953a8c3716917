"""Executed steps as lines of JSON, which a server streams at /steps and a recorder reads.

The first line describes the server.  Each further line is a step, a note that steps are missing, or
empty (so that each side notices when the other is gone).  The last says why the stream ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slosched.core import SloschedError
from slosched.engine.host_time import waited_s
from slosched.engine.loop import StepRecord
from slosched.perfmodel import Measurement
from slosched.perfmodel.measurement import format_chunks, parse_chunks

PATH = "/steps"
MEDIA_TYPE = "application/x-ndjson"
FORMAT = "slosched-steps/1"
NOTHING = b"\n"


class StepLinesError(SloschedError):
    """A line is not one that a server of this version of slosched streams."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first line: the model, device, engine, policy and limits under which the steps ran."""

    provenance: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Step:
    """An executed step."""

    measurement: Measurement
    waited_s: float | None
    """How long the device waited before it; None if it had nothing to do."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A count of executed steps that the stream left out because this reader was too slow."""

    num_steps: int


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a stream that the server ended, with the reason."""

    reason: str


Line = Head | Step | Missing | End


def head_line(provenance: Mapping[str, str]) -> bytes:
    return _line({"format": FORMAT, "provenance": dict(provenance)})


def step_line(record: StepRecord, before: StepRecord | None = None) -> bytes:
    """Return the line of a step; `before` is the step before it, if it is known."""
    batch = record.batch
    chunks = [(chunk.num_new_tokens, chunk.num_prior_tokens) for chunk in batch.chunks]
    return _line(
        {
            "batch": format_chunks(chunks),
            "num_swapped_blocks": len(batch.swap_out) + len(batch.swap_in),
            "seconds": record.result.elapsed_s,
            "waited_s": None if before is None else waited_s(before, record),
        }
    )


def missing_line(num_steps: int) -> bytes:
    return _line({"missing": num_steps})


def end_line(reason: str) -> bytes:
    return _line({"end": reason})


def parse_line(line: bytes) -> Line | None:
    """Return the parsed line; None for an empty one.  Raises StepLinesError if it is not valid."""
    if not line.strip():
        return None
    try:
        return _parse(json.loads(line))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise StepLinesError(f"{line[:80]!r} is not a line of {FORMAT} ({error})") from error


def _line(document: Mapping[str, object]) -> bytes:
    return json.dumps(document).encode() + b"\n"


def _parse(document: Mapping[str, Any]) -> Line:
    if "format" in document:
        if document["format"] != FORMAT:
            raise ValueError(f"the server streams the format {document['format']!r}")
        return Head({str(key): str(value) for key, value in document["provenance"].items()})
    if "missing" in document:
        return Missing(int(document["missing"]))
    if "end" in document:
        return End(str(document["end"]))
    measurement = Measurement(
        chunks=parse_chunks(document["batch"]),
        seconds=float(document["seconds"]),
        num_swapped_blocks=int(document["num_swapped_blocks"]),
    )
    if not 0 < measurement.seconds < math.inf:
        raise ValueError(f"{measurement.seconds!r} is not a positive time in seconds")
    waited = document.get("waited_s")
    return Step(measurement, None if waited is None else float(waited))
