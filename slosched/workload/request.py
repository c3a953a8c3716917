"""One request of a trace, and the error for a trace that is not valid."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from slosched.core import NO_SLO, SLO, OnInfeasible, SloschedError

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
"""The range of priorities that a server takes: 32 bits."""


MOST_SEQUENCES = 128
"""The most answers to a prompt that OpenAI's API allows (`n`)."""


MOST_TOKENS = 10_000_000
"""The longest prompt or output of a trace: no model reads more, and bounds fill tables as long."""


class TraceError(SloschedError, ValueError):
    """A trace, or the file it comes from, is not valid."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    `num_output_tokens` is the number that the model will emit; no policy sees it.
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo: SLO = NO_SLO
    prefix_hashes: tuple[int, ...] = ()
    """One hash for each block of `Trace.prefix_block_tokens` prompt tokens, first block first.

    Two requests whose first n hashes are equal begin with the same n blocks.  Public traces hash
    the last, partly filled block, too; it then differs from the same block when it is full.
    """
    session_id: str | None = None
    """The conversation that the request is a turn of, if the trace says."""
    # `repr` leaves these out, since keys of stored results are made from it.
    priority: int = field(default=0, repr=False)
    """`Request.priority`: policies that look at it serve a lower value earlier."""
    lora_id: str | None = field(default=None, repr=False)
    """The LoRA adapter that the request needs; None for the base model."""
    n: int = field(default=1, repr=False)
    """How many times the prompt is answered (the API's `n`), each time by `num_output_tokens`."""
    tier: str | None = field(default=None, repr=False)
    """The name of the service tier that the request belongs to, if the trace has tiers."""
    tenant: str | None = field(default=None, repr=False)
    """The name of the tenant that the request comes from, if the trace says."""
    think_s: float | None = field(default=None, repr=False)
    """Seconds between the end of the turn before it in its session and its own arrival, in a closed
    loop.  None for a request that arrives at `arrival_s`, whatever became of earlier ones."""
    program_s: float | None = field(default=None, repr=False)
    """The time promised for its whole session, from the arrival of the first turn to the last token
    of the last turn; None if there is none.  All turns of a session say the same."""
    on_infeasible: OnInfeasible = field(default=OnInfeasible.REJECT, repr=False)
    """What its client asks for if its SLO cannot be kept, as far as the policy rejects at all."""

    def __post_init__(self) -> None:
        if not self.request_id or not self.request_id.isprintable():
            raise TraceError(
                f"a request_id must be printable text on one line, not {self.request_id!r}"
            )
        if not math.isfinite(self.arrival_s):
            raise TraceError(
                f"request {self.request_id!r} needs a finite arrival_s, not {self.arrival_s!r}"
            )
        for name in ("num_prompt_tokens", "num_output_tokens"):
            if not 1 <= getattr(self, name) <= MOST_TOKENS:
                raise TraceError(
                    f"request {self.request_id!r} needs 1 <= {name} <= {MOST_TOKENS}, "
                    f"not {getattr(self, name)!r}"
                )
        if not 1 <= self.n <= MOST_SEQUENCES:
            raise TraceError(
                f"request {self.request_id!r}: n must be in [1, {MOST_SEQUENCES}], not {self.n!r}"
            )
        self._check_turn()
        for name in ("session_id", "lora_id", "tier", "tenant"):
            text = getattr(self, name)
            if text is not None and not (text and text.isprintable()):
                raise TraceError(
                    f"request {self.request_id!r}: a {name} must be printable text on one line, "
                    f"not {text!r}"
                )
        if not MIN_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise TraceError(
                f"request {self.request_id!r}: a priority must be in "
                f"[{MIN_PRIORITY}, {MAX_PRIORITY}], not {self.priority!r}"
            )

    def _check_turn(self) -> None:
        """Raise TraceError if what is said of the session is not valid."""
        for name in ("think_s", "program_s"):
            seconds = getattr(self, name)
            if seconds is None:
                continue
            if self.session_id is None:
                raise TraceError(
                    f"request {self.request_id!r} has {name} {seconds!r}, which is for the turns "
                    "of a session: give it a session_id too"
                )
            if not 0 <= seconds < math.inf:
                raise TraceError(
                    f"request {self.request_id!r} needs a finite {name} >= 0, not {seconds!r}"
                )
        if self.think_s is not None and self.n > 1:
            raise TraceError(
                f"request {self.request_id!r} has think_s and n = {self.n}: a turn of a closed "
                "loop has one answer, which the next turn waits for"
            )
