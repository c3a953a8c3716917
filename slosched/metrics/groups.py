"""Records of client requests, of which one may have been answered by several requests at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slosched.core import DeadlineRule, Request
from slosched.metrics.promises import is_good
from slosched.metrics.records import RequestRecord


def records_of(requests: Sequence[Request], rule: DeadlineRule) -> list[RequestRecord]:
    """Return one record for each request, or for each group the record of the worst member."""
    return [
        RequestRecord.from_request(request)
        if request.group is None
        else worst([RequestRecord.from_request(member) for member in request.group.members], rule)
        for request in requests
        if request.group is None or request is request.group.members[0]
    ]


def worst(records: Sequence[RequestRecord], rule: DeadlineRule) -> RequestRecord:
    """Return the record that stands for a group, whose promise holds for every member.

    It is one that broke the promise if there is any; among several, the one that ended last.
    """

    def badness(record: RequestRecord) -> tuple[bool, float]:
        end_s = math.inf if record.end_s is None else record.end_s
        return not is_good(record, rule), end_s

    return max(records, key=badness)
