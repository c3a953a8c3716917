"""Records of requests to score: written by hand, and drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from slosched.core import SLO, EndReason, RequestStatus
from slosched.metrics import RequestRecord

SLO_1S_100MS = SLO(ttft_s=1.0, tpot_s=0.1)


def make_record(
    *token_times_s: float,
    arrival_s: float = 0.0,
    slo: SLO = SLO_1S_100MS,
    status: RequestStatus = RequestStatus.FINISHED,
    reason: EndReason | None = EndReason.STOP,
    prompt: int = 10,
    name: str = "r",
) -> RequestRecord:
    return RequestRecord(
        name, arrival_s, prompt, len(token_times_s), slo, status, reason, token_times_s
    )


def rejected(arrival_s: float, reason: EndReason, prompt: int = 10) -> RequestRecord:
    return make_record(
        arrival_s=arrival_s, status=RequestStatus.REJECTED, reason=reason, prompt=prompt
    )


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    """Draw the record of a request, in any state, that emitted at least one token."""
    arrival_s = draw(st.floats(0, 100))
    times = [arrival_s + draw(st.floats(0, 3))]
    for gap in draw(st.lists(st.floats(0, 2), max_size=12)):
        times.append(times[-1] + gap)
    return make_record(
        *times,
        arrival_s=arrival_s,
        slo=SLO(draw(st.floats(0.01, 3)), draw(st.floats(0.01, 2))),
        status=draw(st.sampled_from(RequestStatus)),
        prompt=draw(st.integers(1, 50)),
    )


def replays() -> st.SearchStrategy[list[RequestRecord]]:
    """Return a strategy for replays in which some requests may have emitted no token."""
    unserved = st.builds(
        rejected,
        st.floats(0, 100),
        st.sampled_from([EndReason.EXPIRED, EndReason.CASCADE]),
        st.integers(1, 50),
    )
    return st.lists(st.one_of(records(), records(), unserved), min_size=1, max_size=30)
