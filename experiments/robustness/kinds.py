"""The kinds of disturbance as data: what each does, how strongly, and its undisturbed strength."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slosched.core import PreemptionMode
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace

WARM_UP_SHARE = 1 / 3
"""The share of a window's requests that do not count; a shift of the workload ends there."""

Change = Callable[[SimulationConfig, str, float], SimulationConfig]
"""A function of an undisturbed replica, a variant and a strength that returns the disturbed one."""


@dataclass(frozen=True)
class Kind:
    """One way to disturb a replica, in one or more variants."""

    name: str
    title: str
    what: str
    """A description of the kind in whole sentences, for the page."""
    axis: str
    """The label of the strength in figures."""
    neutral: float
    """The strength without effect; losses are relative to a replay at this strength."""
    strengths: Sequence[float]
    change: Change = lambda calm, _variant, _strength: calm
    variants: Sequence[str] = ("",)
    shifts_outputs: bool = False
    """Whether the strength shortens the outputs before the end of the warm-up, not the replica."""
    label: Callable[[float], str] = "×{:g}".format

    def trace(self, window: Trace, strength: float) -> Trace:
        """Return the window, or one whose outputs in the warm-up are shorter by `strength`."""
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
    """Return all kinds; `small_caches` are the factors by which the KV cache is made smaller."""
    return (
        Kind(
            name="bias",
            title="A latency model that is wrong by a constant factor",
            what="Each step takes the given multiple of the time that the policy's latency model "
            "predicts; the device is the same in all replays. The model either stays as it was "
            "fitted, or is corrected with the measured steps (`OnlineModel`), as `serve` does.",
            axis="step time / predicted time",
            neutral=1.0,
            strengths=(0.8, 0.9, 1.1, 1.2),
            change=_bias,
            variants=(_FITTED, _LEARNT),
        ),
        Kind(
            name="tail",
            title="Heavy-tailed steps",
            what="A share of the steps is slow: at least twice as long, Pareto with exponent 2. "
            "The others are faster, so that the average is the same.",
            axis="slow steps",
            neutral=0.0,
            strengths=(0.01, 0.03, 0.1),
            change=_tail,
            label=lambda strength: f"{100 * strength:.0f} %",
        ),
        Kind(
            name="stall",
            title="Stalls",
            what="The device stands still at random times, every 10 s on average, at the same "
            "times for every policy.",
            axis="each stall lasts",
            neutral=0.0,
            strengths=(0.05, 0.2, 0.5),
            change=_stall,
            label=lambda strength: f"{strength * 1e3:.0f} ms",
        ),
        Kind(
            name="lengths",
            title="Outputs that become longer",
            what="The outputs of the first third of the requests, which do not count, are shorter "
            "by the given factor. The requests that count have their usual outputs. So the load is "
            "no higher, but a policy that has learnt output lengths has learnt wrong ones.",
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
            what="The next step is planned while another one runs, as in engines that overlap "
            "scheduling with the device. The policy does not know yet how the running step ends.",
            axis="plans are old by",
            neutral=0.0,
            strengths=(1.0,),
            change=_stale,
            label="{:g} step".format,
        ),
    )
