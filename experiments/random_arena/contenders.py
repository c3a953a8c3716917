"""Who takes part: ours, the baselines with dropping, and published policies and engines."""

from __future__ import annotations

from dataclasses import replace

from experiments.arena.contenders import Class, Entry, chosen
from slosched.evaluate.tuning import values_of

FLAGSHIP = "goodput"
PORTFOLIO = "portfolio"
RIVALS = (Class.DROPPING, Class.PUBLISHED)
"""The classes that ours are compared with the best of."""
REFERENCES = (FLAGSHIP, "edf+drop", "slidebatching")
"""Policies of three kinds; the best of them sets the rate at which all are tuned."""
_DROPPING = ("edf+drop", "fcfs+drop", "sjf+drop", "sarathi+drop")
_PUBLISHED = ("slidebatching", "qoserve", "slai", "slo_aware")
_ENGINES = ("vllm_v1+early_rejection",)


def contenders(*, portfolio: bool) -> list[Entry]:
    """Return all contenders, with the values that are tried of each.

    `slo_aware` is the algorithm that this project began with.  It counts among the published here.
    An engine rejects nothing by itself, so it has Mooncake's early rejection in front.
    """
    ours = chosen([FLAGSHIP, PORTFOLIO] if portfolio else [FLAGSHIP])
    ours = [replace(entry, group=Class.OURS) for entry in ours]
    published = [replace(entry, group=Class.PUBLISHED) for entry in chosen(_PUBLISHED)]
    engines = [Entry(spec, Class.PUBLISHED, spec, values_of(spec, {})) for spec in _ENGINES]
    return [*ours, *chosen(_DROPPING), *published, *engines]
