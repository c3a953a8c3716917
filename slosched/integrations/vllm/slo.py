"""What a request inside vLLM is promised: its own `vllm_xargs`, else its tier, else the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slosched.core import NO_SLO, SLO, SloschedError
from slosched.workload import seconds_of_ms

TTFT_FIELD, TPOT_FIELD, TIER_FIELD = "slo_ttft_ms", "slo_tpot_ms", "slo_tier"


class BadPromiseError(SloschedError, ValueError):
    """A request asks for a promise that nobody can give."""


@dataclass(frozen=True, slots=True)
class Promises:
    """What the operator promises to requests that say nothing, and to those that name a tier."""

    default: SLO = NO_SLO
    tiers: Mapping[str, SLO] = field(default_factory=dict)

    def of(self, extra_args: Mapping[str, object] | None) -> SLO:
        """The SLO of a request whose `vllm_xargs` are `extra_args`.

        Each of the two times is looked up on its own.  Raises BadPromiseError for a time that is
        no positive, finite number of milliseconds, and for a tier that there is not.
        """
        if not extra_args:
            return self.default
        base = self._tier(extra_args[TIER_FIELD]) if TIER_FIELD in extra_args else self.default
        ttft_ms, tpot_ms = extra_args.get(TTFT_FIELD), extra_args.get(TPOT_FIELD)
        return SLO(
            base.ttft_s if ttft_ms is None else seconds_of(TTFT_FIELD, ttft_ms),
            base.tpot_s if tpot_ms is None else seconds_of(TPOT_FIELD, tpot_ms),
            base.e2e_s,
        )

    def _tier(self, name: object) -> SLO:
        if not isinstance(name, str) or name not in self.tiers:
            raise BadPromiseError(
                f"{TIER_FIELD} {name!r:.100} is none of this server's tiers: "
                f"{', '.join(self.tiers) or 'it has none'}"
            )
        return self.tiers[name]


def seconds_of(name: str, milliseconds: object) -> float:
    """Seconds of a request's time; BadPromiseError if it is none."""
    try:
        return seconds_of_ms(name, milliseconds)
    except ValueError as error:
        raise BadPromiseError(str(error)) from None
