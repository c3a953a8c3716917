"""What is done to the policies, as data: kinds of disturbance, how strong, and what it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slosched.core import PreemptionMode
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace

WARM_UP_SHARE = 1 / 3
"""Of the requests of a window, those that are not counted; a shift of the workload ends there."""

Change = Callable[[SimulationConfig, str, float], SimulationConfig]
"""Of an undisturbed replica, a variant and a strength."""


@dataclass(frozen=True)
class Kind:
    """One way to disturb a replica, in one or more variants."""

    name: str
    title: str
    what: str
    """What is done, as a sentence."""
    axis: str
    """What the strength says, for figures."""
    neutral: float
    """The strength that is none: losses are against a replay at this one."""
    strengths: Sequence[float]
    change: Change = lambda calm, _variant, _strength: calm
    variants: Sequence[str] = ("",)
    shifts_outputs: bool = False
    """Whether strength is a factor of the output lengths after the warm-up, not of the replica."""
    label: Callable[[float], str] = "×{:g}".format

    def trace(self, window: Trace, strength: float) -> Trace:
        """What is played of a window: itself, or with shorter outputs to begin with."""
        if not self.shifts_outputs or strength == self.neutral:
            return window
        num_before = num_warm_up(window)
        before = (
            replace(r, num_output_tokens=max(1, round(r.num_output_tokens / strength)))
            for r in window.requests[:num_before]
        )
        return replace(window, requests=(*before, *window.requests[num_before:]))


def num_warm_up(window: Trace) -> int:
    return round(WARM_UP_SHARE * len(window))


_FITTED, _LEARNT = "as fitted", "corrected online"


def _bias(calm: SimulationConfig, variant: str, strength: float) -> SimulationConfig:
    return replace(calm, bias=strength, online=variant == _LEARNT)


def _tail(calm: SimulationConfig, _: str, strength: float) -> SimulationConfig:
    return replace(calm, disturbances=Disturbances(tail=strength))


def _stall(calm: SimulationConfig, _: str, strength: float) -> SimulationConfig:
    return replace(calm, disturbances=Disturbances(stall_s=strength))


def _small_cache(calm: SimulationConfig, variant: str, strength: float) -> SimulationConfig:
    limits = replace(calm.limits, preemption_mode=PreemptionMode(variant))
    num_blocks = round(calm.num_blocks / strength)
    return replace(calm, limits=limits, num_blocks=num_blocks, num_host_blocks=calm.num_blocks)


def _stale(calm: SimulationConfig, _: str, strength: float) -> SimulationConfig:
    return replace(calm, overlap=strength > 0)


def kinds(small_caches: Sequence[float]) -> tuple[Kind, ...]:
    """All of them; `small_caches` are the factors by which the KV cache is made smaller."""
    return (
        Kind(
            name="bias",
            title="A latency model that is wrong by a constant factor",
            what="Steps take the given factor of what the policy's latency model says; the device "
            "is the same in all replays. The model stays as it was fitted, or is corrected by the "
            "steps that are run (`OnlineModel`), as `serve` does.",
            axis="steps take, of what the model says",
            neutral=1.0,
            strengths=(0.8, 0.9, 1.1, 1.2),
            change=_bias,
            variants=(_FITTED, _LEARNT),
        ),
        Kind(
            name="tail",
            title="Heavy-tailed steps",
            what="A share of the steps is slow: at least twice as long, Pareto with exponent 2. "
            "The others are faster by as much, so that the device is as fast on average.",
            axis="slow steps",
            neutral=0.0,
            strengths=(0.01, 0.03, 0.1),
            change=_tail,
            label=lambda strength: f"{100 * strength:.0f} %",
        ),
        Kind(
            name="stall",
            title="Stalls",
            what="The device stands still at random, every 10 s on average, at the same times for "
            "every policy.",
            axis="each stall lasts",
            neutral=0.0,
            strengths=(0.05, 0.2, 0.5),
            change=_stall,
            label=lambda strength: f"{strength * 1e3:.0f} ms",
        ),
        Kind(
            name="lengths",
            title="Outputs that become longer than they used to be",
            what="The outputs of the requests that are not counted, the first third, are shorter "
            "by the given factor; those that are counted are what they always were. So the load "
            "is no higher, but whoever has learnt how long outputs are has learnt it wrong.",
            axis="outputs become longer by",
            neutral=1.0,
            strengths=(2.0, 4.0),
            shifts_outputs=True,
        ),
        Kind(
            name="kv",
            title="A KV cache that is too small",
            what="The cache is smaller by the given factor, so that requests are preempted: "
            "computed anew, or swapped to the host's memory and back.",
            axis="cache, smaller by",
            neutral=1.0,
            strengths=small_caches,
            change=_small_cache,
            variants=(PreemptionMode.RECOMPUTE.value, PreemptionMode.SWAP.value),
            label="÷{:g}".format,
        ),
        Kind(
            name="stale",
            title="Plans that are one step old",
            what="The next step is planned while one runs, as engines do that overlap scheduling "
            "with the device: the policy does not know yet how the running one will end.",
            axis="plans are old by",
            neutral=0.0,
            strengths=(1.0,),
            change=_stale,
            label="{:g} step".format,
        ),
    )
