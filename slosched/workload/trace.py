"""A trace: requests with their arrival times, lengths and SLOs.

A trace is immutable.  Every operation returns a new trace and notes itself in `provenance`, so that
a result can say which requests it was measured on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from slosched.core import SLO, OnInfeasible
from slosched.workload.marks import Adapters, Priorities
from slosched.workload.programs import (
    with_moved_programs,
    with_program_deadlines,
    with_think_times,
)
from slosched.workload.request import MOST_TOKENS, TraceError, TraceRequest
from slosched.workload.slo import SLORule, Tiers
from slosched.workload.statistics import (
    FloatArray,
    IntArray,
    describe_lengths,
    describe_sessions,
    dispersion_of_counts,
    interarrival_cv,
    prefix_hit_rate,
)

__all__ = ["Clipped", "Provenance", "Trace", "TraceError", "TraceRequest"]

Provenance = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, the first at 0.  `Trace.of` sorts and shifts for you."""

    requests: tuple[TraceRequest, ...]
    name: str
    provenance: Provenance = field(default_factory=dict)
    """The source of the trace, and the operations that made it."""
    prefix_block_tokens: int | None = None
    """Prompt tokens for each of `TraceRequest.prefix_hashes`."""

    def __post_init__(self) -> None:
        if not self.requests:
            raise TraceError(f"trace {self.name!r} is empty: it needs at least one request")
        arrivals = [request.arrival_s for request in self.requests]
        if arrivals[0] != 0 or any(b < a for a, b in pairwise(arrivals)):
            raise TraceError(
                f"trace {self.name!r} must be sorted by arrival and start at 0 "
                f"(it starts at {arrivals[0]!r}); Trace.of() does both"
            )
        ids = {request.request_id for request in self.requests}
        if len(ids) != len(self.requests):
            counts = Counter(request.request_id for request in self.requests)
            ((most, count),) = counts.most_common(1)
            raise TraceError(
                f"trace {self.name!r} repeats request ids: {len(self.requests)} requests have "
                f"{len(ids)} different ones, and {count} are called {most!r}; name each differently"
            )
        block = self.prefix_block_tokens
        if block is None and not any(r.prefix_hashes for r in self.requests):
            return
        if block is None or block < 1:
            raise TraceError(
                f"trace {self.name!r}: prefix_block_tokens must say how many tokens a prefix hash "
                f"stands for, at least 1, not {block!r}"
            )

    @classmethod
    def of(
        cls,
        requests: Iterable[TraceRequest],
        name: str,
        provenance: Provenance | None = None,
        prefix_block_tokens: int | None = None,
    ) -> Trace:
        """Make a trace of requests in any order and from any time zero; ties keep their order."""
        ordered = _from_zero(sorted(requests, key=lambda request: request.arrival_s))
        return cls(tuple(ordered), name, dict(provenance or {}), prefix_block_tokens)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def duration_s(self) -> float:
        """Return the seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s

    @property
    def rate(self) -> float:
        """Return the requests/s, the reciprocal of the mean gap.

        NaN for a single request, inf if all arrive at the same time.
        """
        if len(self) < 2:
            return math.nan
        return (len(self) - 1) / self.duration_s if self.duration_s else math.inf

    @property
    def arrivals_s(self) -> FloatArray:
        """Return the arrival times, of shape (n,)."""
        return np.array([r.arrival_s for r in self.requests], dtype=np.float64)

    @property
    def prompt_tokens(self) -> IntArray:
        """Return the prompt lengths, of shape (n,)."""
        return np.array([r.num_prompt_tokens for r in self.requests], dtype=np.int64)

    @property
    def output_tokens(self) -> IntArray:
        """Return the output lengths, of shape (n,)."""
        return np.array([r.num_output_tokens for r in self.requests], dtype=np.int64)

    def own_rate(self) -> float:
        """Return the rate; raise TraceError if there is none that could be changed."""
        if not 0 < self.rate < math.inf:
            come = "is 1 request" if len(self) == 1 else f"are {len(self)} requests at one time"
            raise TraceError(
                f"trace {self.name!r} has no rate to change: it needs two arrivals at different "
                f"times, but there {come}"
            )
        return self.rate

    def scaled_to(self, rate: float) -> Trace:
        """Return the same trace played faster or slower, so that `rate` requests/s arrive.

        Time is stretched or compressed. Order, IAT CV and the shape of bursts stay; at a higher
        rate bursts are shorter relative to the service time (`thinned_to` keeps their duration and
        weakens them).  What is promised and the `think_s` of turns stay, since neither devices nor
        people get faster; but the time of a program includes the pauses until turns that arrive at
        their own times, and changes with these.
        """
        if not 0 < rate < math.inf:
            raise ValueError(f"rate must be a positive number of requests/s, not {rate!r}")
        stretch = self.own_rate() / rate
        moved = [replace(r, arrival_s=r.arrival_s * stretch) for r in self.requests]
        return self._derived(self._with_moved_programs(moved), rate=rate)

    def thinned_to(self, rate: float, seed: int = 0) -> Trace:
        """Return a random part of the requests, at their own times, at about `rate` requests/s.

        Bursts keep their duration, but deleting requests independently moves the arrivals towards a
        Poisson process, so this is another experiment than `scaled_to`.  With one seed, a lower
        rate keeps a part of what a higher one keeps (common random numbers).  The first and last
        request kept are not those of the trace, so the rate is met only nearly.
        """
        own_rate = self.own_rate()
        if not 0 < rate <= own_rate:
            raise ValueError(
                f"trace {self.name!r} can be thinned to a rate in (0, {own_rate:.6g}] requests/s,"
                f" its own, not to {rate!r}"
            )
        num_kept = len(self) if rate == own_rate else max(1, round(len(self) * rate / own_rate))
        kept = np.sort(np.random.default_rng(seed).permutation(len(self))[:num_kept])
        requests = _from_zero([self.requests[i] for i in kept])
        return self._derived(requests, thinned_to=rate, thinning_seed=seed)

    def with_poisson_arrivals(self, rate: float | None = None, seed: int = 0) -> Trace:
        """Return the Poisson control: the same requests in the same order, without their bursts.

        The mean rate is exactly `rate`, the trace's own unless given.  The difference of a metric
        between a trace and its control is the effect of the bursts.  Given their number and the
        first and last of them, the arrivals of a Poisson process are uniform in between.  The times
        of programs change as in `scaled_to`.
        """
        rate = self.own_rate() if rate is None else rate
        if not 0 < rate < math.inf:
            raise ValueError(f"rate must be a positive number of requests/s, not {rate!r}")
        duration_s = (len(self) - 1) / rate
        inside = np.random.default_rng(seed).random(max(0, len(self) - 2))
        times_s = np.concatenate(([0.0], np.sort(inside), [1.0]))[: len(self)] * duration_s
        moved = [
            replace(r, arrival_s=float(t)) for r, t in zip(self.requests, times_s, strict=True)
        ]
        requests = self._with_moved_programs(moved)
        return self._derived(requests, poisson_rate=rate, poisson_seed=seed)

    def head(self, n: int) -> Trace:
        """Return the first `n` requests (all of them if there are fewer)."""
        if n < 1:
            raise ValueError(f"head needs n >= 1, not {n!r}")
        return self._derived(self.requests[:n], head=n)

    def window(self, start_s: float, duration_s: float) -> Trace:
        """Return the requests that arrive in [start_s, start_s + duration_s), the first at 0."""
        if not duration_s > 0 or math.isnan(start_s):
            raise ValueError(
                f"a window needs a start and a positive duration, not {start_s!r}, {duration_s!r}"
            )
        inside = [r for r in self.requests if start_s <= r.arrival_s < start_s + duration_s]
        if not inside:
            raise TraceError(
                f"no request of trace {self.name!r} arrives in "
                f"[{start_s}, {start_s + duration_s}) s; it spans [0, {self.duration_s:.3f}] s"
            )
        return self._derived(_from_zero(inside), window_start_s=start_s, window_s=duration_s)

    def with_slo(self, slo: SLO | SLORule) -> Trace:
        """Return the same requests, each with `slo`, or with the SLO that the rule gives it."""
        lengths = [r.num_prompt_tokens for r in self.requests]
        slos = [slo] * len(self) if isinstance(slo, SLO) else slo.assign(lengths)
        given = zip(self.requests, slos, strict=True)
        requests = [r if r.slo is s else replace(r, slo=s) for r, s in given]
        if isinstance(slo, Tiers) and slo.names:
            tiers = slo.tiers_of(len(self))
            requests = [replace(r, tier=t) for r, t in zip(requests, tiers, strict=True)]
        return self._derived(requests)

    def with_priorities(self, priorities: Priorities) -> Trace:
        """Return the same requests, each with a priority drawn for it."""
        drawn = priorities.assign(len(self))
        requests = [replace(r, priority=p) for r, p in zip(self.requests, drawn, strict=True)]
        return self._derived(requests, priorities=str(priorities), priorities_seed=priorities.seed)

    def with_adapters(self, adapters: Adapters) -> Trace:
        """Return the same requests, each with a LoRA adapter drawn for it."""
        drawn = adapters.assign(len(self))
        requests = [replace(r, lora_id=name) for r, name in zip(self.requests, drawn, strict=True)]
        return self._derived(requests, loras=str(adapters), loras_seed=adapters.seed)

    def closed_loop(self, tpot_s: float) -> Trace:
        """Return the trace with each turn of a session waiting for the end of the turn before it.

        The time between the two is what is left of the gap between their arrivals if the answer
        before took `tpot_s` for each token, and 0 if nothing is left.  Turns that have `think_s`
        keep it.  Raises TraceError if the trace has no sessions.
        """
        if not 0 <= tpot_s < math.inf:
            raise ValueError(f"a TPOT must be finite and not negative, not {tpot_s!r} s")
        if all(r.session_id is None for r in self.requests):
            raise TraceError(
                f"trace {self.name!r} names no sessions, so no turn can wait for another: use a "
                "trace with a column session_id, or the kind agents or sessions"
            )
        return self._derived(with_think_times(self.requests, tpot_s), closed_loop_tpot_s=tpot_s)

    def with_program_deadlines(self, base_s: float, factor: float = 0.0) -> Trace:
        """Return the trace with a time promised for each whole session.

        It is `base_s`, plus `factor` times what the session takes if each turn just keeps its TTFT
        and TPOT, plus all its times between turns.  Before a turn that arrives at its own time, it
        is what passes until then after all that the turns before it may take.  A turn behind the
        first that would be rejected for being late is relegated instead, since its program may
        still be on time.  Raises TraceError if nothing has a session, or if a factor is given and a
        turn has no TTFT or no TPOT.
        """
        requests = with_program_deadlines(self.requests, base_s, factor)
        return self._derived(requests, program_base_s=base_s, program_factor=factor)

    def with_on_infeasible(self, on_infeasible: OnInfeasible) -> Trace:
        """Return the same requests, of which every one asks for this if its SLO cannot be kept."""
        requests = [replace(r, on_infeasible=on_infeasible) for r in self.requests]
        return self._derived(requests, on_infeasible=str(on_infeasible))

    @property
    def is_closed_loop(self) -> bool:
        """Tell whether any request waits for the end of another."""
        return any(r.think_s is not None for r in self.requests)

    def with_lengths_scaled(self, factor: float) -> Trace:
        """Return the trace with all lengths multiplied by `factor`, each at least one token.

        A small device can thus be offered the mix of a large device's trace.  Prefix hashes stay,
        and their blocks are scaled by the same factor.
        """
        if not 0 < factor <= MOST_TOKENS:
            raise ValueError(
                f"lengths can be scaled by a positive factor of at most {MOST_TOKENS}, the most "
                f"tokens of a prompt, not {factor!r}"
            )
        block = self.prefix_block_tokens
        scaled_block = None if block is None else max(1, round(block * factor))
        requests = [
            _with_lengths(
                r,
                max(1, round(r.num_prompt_tokens * factor)),
                max(1, round(r.num_output_tokens * factor)),
                scaled_block,
            )
            for r in self.requests
        ]
        scaled = self._derived(requests, length_scale=factor)
        return replace(scaled, prefix_block_tokens=scaled_block)

    def clipped(
        self, max_prompt_tokens: int | None = None, max_output_tokens: int | None = None
    ) -> Clipped:
        """Shorten prompts and outputs that are longer than given, and return how many were."""
        for name, limit in (("prompt", max_prompt_tokens), ("output", max_output_tokens)):
            if limit is not None and limit < 1:
                raise ValueError(f"max_{name}_tokens must be at least 1, not {limit!r}")
        prompt_limit = math.inf if max_prompt_tokens is None else max_prompt_tokens
        output_limit = math.inf if max_output_tokens is None else max_output_tokens
        num_prompts = sum(r.num_prompt_tokens > prompt_limit for r in self.requests)
        num_outputs = sum(r.num_output_tokens > output_limit for r in self.requests)
        requests = [
            _with_lengths(
                r,
                int(min(r.num_prompt_tokens, prompt_limit)),
                int(min(r.num_output_tokens, output_limit)),
                self.prefix_block_tokens,
            )
            for r in self.requests
        ]
        trace = self._derived(requests, clipped_prompts=num_prompts, clipped_outputs=num_outputs)
        return Clipped(trace, num_prompts, num_outputs)

    def summary(self) -> dict[str, str | float]:
        """Return one row of size, span, rate, burstiness, and statistics of the lengths.

        `iat_cv` is the coefficient of variation of the gaps between arrivals; `idc_1s` and
        `idc_60s` are the index of dispersion of counts (variance / mean of arrivals in a window; a
        Poisson process has 1).  They are NaN where the trace is too short.  `prefix_hit_rate` is
        present if the trace has prefix hashes, and `sessions` and `turns_mean` if it has
        conversations.  `priorities` and `loras` are numbers of different ones, present where
        requests differ in them.
        """
        arrivals = self.arrivals_s
        row: dict[str, str | float] = {
            "trace": self.name,
            "n": len(self),
            "span_s": self.duration_s,
            "rate": self.rate,
            "iat_cv": interarrival_cv(arrivals),
            "idc_1s": dispersion_of_counts(arrivals, 1.0),
            "idc_60s": dispersion_of_counts(arrivals, 60.0),
        }
        row |= describe_lengths("prompt", self.prompt_tokens)
        row |= describe_lengths("output", self.output_tokens)
        if self.prefix_block_tokens is not None:
            row["prefix_hit_rate"] = prefix_hit_rate(r.prefix_hashes for r in self.requests)
        row |= describe_sessions(r.session_id for r in self.requests)
        return row | self._num_marks()

    def _num_marks(self) -> dict[str, int]:
        """Return the numbers of different priorities and LoRA adapters, where there are any."""
        priorities = len({r.priority for r in self.requests})
        loras = len({r.lora_id for r in self.requests} - {None})
        found = {"priorities": priorities} if priorities > 1 else {}
        return found | ({"loras": loras} if loras else {})

    def _with_moved_programs(self, moved: Sequence[TraceRequest]) -> list[TraceRequest]:
        """Return the moved requests, with the times of the programs that belong to them."""
        factor = self.provenance.get("program_factor", 0.0)
        known = float(factor) if isinstance(factor, int | float) else 0.0
        return with_moved_programs(self.requests, moved, known)

    def _derived(self, requests: Sequence[TraceRequest], **noted: str | float) -> Trace:
        return replace(self, requests=tuple(requests), provenance={**self.provenance, **noted})


class Clipped(NamedTuple):
    """The result of `Trace.clipped`."""

    trace: Trace
    num_prompts: int
    num_outputs: int


def _from_zero(ordered: Sequence[TraceRequest]) -> Sequence[TraceRequest]:
    """Return the requests, which are in order of arrival, with the first one moved to 0."""
    start_s = ordered[0].arrival_s if ordered else 0.0
    return (
        ordered if start_s == 0 else [replace(r, arrival_s=r.arrival_s - start_s) for r in ordered]
    )


def _with_lengths(
    request: TraceRequest, num_prompt_tokens: int, num_output_tokens: int, block: int | None
) -> TraceRequest:
    """Return the request with other lengths, and with the prefix hashes of the kept blocks."""
    num_hashes = 0 if block is None else math.ceil(num_prompt_tokens / block)
    return replace(
        request,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        prefix_hashes=request.prefix_hashes[:num_hashes],
    )
