"""Programs on time: sessions that were promised a time as a whole."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from slosched.core import TOLERANCE_S, RequestStatus
from slosched.metrics.records import RequestRecord


def num_programs_on_time(records: Sequence[RequestRecord]) -> tuple[int, int]:
    """Return the number of programs on time, and of all programs.

    A program is a session with a `program_s`.  It is on time if all its turns finished, and its
    last token came within that time of its first arrival.
    """
    first_s: dict[str, float] = defaultdict(lambda: math.inf)
    last_s: dict[str, float] = defaultdict(lambda: -math.inf)
    promised_s: dict[str, float] = {}
    for record in records:
        name = record.session_id
        if name is None or record.program_s is None:
            continue
        promised_s[name] = record.program_s
        first_s[name] = min(first_s[name], record.arrival_s)
        is_finished = record.status is RequestStatus.FINISHED and record.token_times_s
        ended_s = record.token_times_s[-1] if is_finished else math.inf
        last_s[name] = max(last_s[name], ended_s)
    num_on_time = sum(
        last_s[name] - first_s[name] <= seconds + TOLERANCE_S
        for name, seconds in promised_s.items()
    )
    return num_on_time, len(promised_s)
