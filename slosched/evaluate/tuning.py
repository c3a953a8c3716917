"""Search for the best hyper-parameters of a policy, on requests that do not judge the result.

One parameter after the other is tried at each of its values, while the others keep the best values
found so far, until a round over all parameters improves nothing.  A comparison is fair only if the
baselines are tuned as well: their defaults were chosen for their authors' workloads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slosched.core import Limits
from slosched.evaluate.capacity import (
    CapacityError,
    Contender,
    MakePool,
    Measured,
    Plan,
    Store,
    Study,
    Sweep,
)
from slosched.evaluate.statistics import antitonic, crossing
from slosched.policy.spec import (
    PolicySpecError,
    make_policy,
    option_value,
    values_to_try,
    with_options,
)
from slosched.replay.json_fields import as_object
from slosched.simulator.simulate import SimulationConfig
from slosched.workload.trace import Trace

TUNED_FORMAT = "slosched-tuned/1"
MAX_ROUNDS = 3
LIMITS = ("max_num_batched_tokens", "max_num_seqs")
"""The limits of a replica that may be tuned like a policy's hyper-parameters."""

Setting = Mapping[str, str]
"""Values by the name of the hyper-parameter or limit, as they are written in a spec."""
OnTrial = Callable[["Trial"], None]


@dataclass(frozen=True)
class Trial:
    """A setting and its score on the tuning windows, in requests/s."""

    setting: dict[str, str]
    policy: str
    score: float
    error: str = ""


@dataclass(frozen=True)
class Tuned:
    """The result of `slosched tune`."""

    base: str
    """The policy before it was tuned."""
    policy: str
    limits: dict[str, int]
    """The limits that are part of the best setting."""
    metric: str
    workload: str
    trials: list[Trial] = field(default_factory=list)

    def __str__(self) -> str:
        limits = "".join(f", {name}={value}" for name, value in self.limits.items())
        return (
            f"{self.base} -> {self.policy}{limits}, for {self.metric} on {self.workload}, the "
            f"best of {len(self.trials)}"
        )

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"format": TUNED_FORMAT, **asdict(self)}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Tuned:
        """Read what `slosched tune` wrote.  Raises CapacityError for any other file."""
        try:
            document = as_object(json.loads(path.read_text(encoding="utf-8")))
            if document.pop("format") != TUNED_FORMAT:
                raise ValueError("another format")
            trials = [Trial(**trial) for trial in document.pop("trials")]
            tuned = cls(**document, trials=trials)
            if not isinstance(tuned.policy, str):
                raise TypeError(f"policy must be a spec such as fcfs, not {tuned.policy!r}")
            if unknown := tuned.limits.keys() - LIMITS:
                raise ValueError(f"no limits to tune: {', '.join(sorted(unknown))}")
            for name, value in tuned.limits.items():
                if not isinstance(value, int) or value < 1:
                    raise ValueError(f"{name} must be a whole number of 1 or more, not {value!r}")
            return tuned
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise CapacityError(
                f"{path} is not what `slosched tune` writes as tuned.json ({why})"
            ) from error

    @property
    def name(self) -> str:
        """Return the name of the tuned policy in tables."""
        return f"{self.policy} (tuned)"

    def on(self, replica: SimulationConfig) -> SimulationConfig:
        """Return the replica with the limits that are part of the best setting."""
        return replace(replica, limits=_limited(replica.limits, self.limits))

    def contender(self, base: Contender) -> Contender:
        """Return the tuned policy as a contender on the replica of `base`."""
        return replace(base, name=self.name, policy=self.policy, config=self.on(base.config))


@dataclass(frozen=True)
class Objective:
    """The measure to maximize: the capacity at a target, or good requests/s at a rate."""

    target: float = 0.99
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < np.inf:
            raise ValueError(f"a policy is tuned at a positive rate, not {self.rate!r} requests/s")

    def __str__(self) -> str:
        if self.rate is not None:
            return f"good requests/s at {self.rate:g} requests/s"
        return f"capacity at {100 * self.target:.4g} %"

    def plan(self, precision: float) -> Plan:
        if self.rate is None:
            return Plan((self.target,), precision)
        return Plan((self.target,), _precision_through(self.rate), at_rate=self.rate)

    def score(self, measured: Measured) -> float:
        """Return the score in requests/s.

        It is the best attainment minus 1 if no rate reaches the target, and -2 if the replays
        failed.
        """
        pooled = measured.pooled()
        if measured.error is not None or not pooled:
            return -2.0
        places = sorted(pooled)
        rates = np.array([measured.lattice.rate(k) for k in places])
        shares = np.array([pooled[k] for k in places])
        if self.rate is not None:
            return float(rates[0] * shares[0])
        curve = antitonic(shares, np.ones(len(shares)))
        # If no setting reaches the target, the best attainment decides, below every capacity.
        return (
            float(crossing(rates, curve, self.target)) if curve[0] >= self.target else curve[0] - 1
        )


def values_of(policy: str, given: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the values to try for each parameter: as given, else as the policy's fields declare.

    Raises ValueError for a parameter that neither the policy nor the replica has, and if there is
    nothing to try.
    """
    if given:
        for name, values in given.items():
            for value in values:
                _applied(policy, Limits(), {name: value})
        return {name: list(values) for name, values in given.items()}
    found = {
        name: [str(value) for value in values] for name, values in values_to_try(policy).items()
    }
    if not found:
        raise ValueError(
            f"{policy} declares nothing to try: say what with --grid name=value,value (a "
            f"hyper-parameter, or one of {', '.join(LIMITS)})"
        )
    return found


class Tuner:
    """A coordinate ascent over the values of each parameter."""

    def __init__(
        self,
        base: Contender,
        values: Mapping[str, Sequence[str]],
        windows: Sequence[Trace],
        objective: Objective,
        *,
        precision: float = 0.03,
        store: Store | None = None,
        max_trials: int | None = None,
    ) -> None:
        """Prepare a search on `windows`, which must not be those that the result is judged on.

        After `max_trials` settings (at least 1) nothing new is tried, so that all contenders can be
        given the same effort.
        """
        if max_trials is not None and max_trials < 1:
            raise ValueError(f"max_trials must be at least 1, not {max_trials}")
        self._base, self._values, self._windows = base, values, windows
        self._objective, self._precision, self._store = objective, precision, store
        self._max_trials = max_trials
        self.trials: dict[str, Trial] = {}

    def run(self, make_pool: MakePool, on_trial: OnTrial | None = None) -> Tuned:
        """Return the best setting, which is the policy as it was if nothing beats it.

        Settings whose values do not go together are left out.
        Raises CapacityError if no setting could be replayed.
        """
        (best,) = self._try([{}], make_pool, on_trial)
        for _ in range(MAX_ROUNDS):
            before = best
            for name, values in self._values.items():
                others = [{**best.setting, name: value} for value in values]
                possible = list(filter(self._goes_together, others))
                best = max([best, *self._try(possible, make_pool, on_trial)], key=_score)
            if best is before:
                break
        if best.error:
            raise CapacityError(f"no setting of {self._base.policy} could be tried: {best.error}")
        limits = {name: int(best.setting[name]) for name in LIMITS if name in best.setting}
        return Tuned(
            base=self._base.policy,
            policy=best.policy,
            limits=limits,
            metric=str(self._objective),
            workload=f"{len(self._windows)} x {len(self._windows[0])} requests of "
            f"{self._windows[0].name}",
            trials=sorted(self.trials.values(), key=_score, reverse=True),
        )

    def _try(
        self, settings: Sequence[dict[str, str]], make_pool: MakePool, on_trial: OnTrial | None
    ) -> list[Trial]:
        """Return the trials of these settings; those that are new are simulated side by side."""
        new = {self._key(s): s for s in settings if self._key(s) not in self.trials}
        if self._max_trials is not None:
            new = dict(list(new.items())[: self._max_trials - len(self.trials)])
        if new:
            contenders = {key: self._contender(setting) for key, setting in new.items()}
            plan = self._objective.plan(self._precision)
            sweep = Sweep(list(contenders.values()), self._windows, plan, self._store)
            sweep.run(make_pool)
            for key, contender in contenders.items():
                measured = sweep.measured[contender.name]
                score, error = self._objective.score(measured), str(measured.error or "")
                self.trials[key] = Trial(new[key], contender.policy, score, error)
                if on_trial is not None:
                    on_trial(self.trials[key])
        return [self.trials[key] for s in settings if (key := self._key(s)) in self.trials]

    def _goes_together(self, setting: Setting) -> bool:
        """Tell whether there is a policy with these values; two may exclude each other."""
        try:
            self._key(setting)
        except ValueError:
            return False
        return True

    def _key(self, setting: Setting) -> str:
        """Return a key that is equal for settings that make the same policy and limits.

        A setting that names a default value has the same key as one that leaves it out.
        """
        policy, limits = _applied(self._base.policy, self._base.config.limits, setting)
        return f"{make_policy(policy)!r} {limits!r}"

    def _contender(self, setting: Setting) -> Contender:
        policy, limits = _applied(self._base.policy, self._base.config.limits, setting)
        config = replace(self._base.config, limits=limits)
        return replace(self._base, name=self._key(setting), policy=policy, config=config)


def judge(
    base: Contender,
    tuned: Tuned,
    windows: Sequence[Trace],
    plan: Plan,
    make_pool: MakePool,
    store: Store | None = None,
) -> Study:
    """Measure the original and the tuned policy on windows that were not used for tuning."""
    contenders = [base]
    if tuned.trials[0].setting:
        contenders.append(tuned.contender(base))
    sweep = Sweep(contenders, windows, plan, store)
    sweep.run(make_pool)
    return Study(list(sweep.measured.values()), windows)


def _precision_through(rate: float) -> float:
    """Return a precision, about 1 % at most, of whose lattice of rates this one is.

    A sweep measures at the nearest rate of its lattice, but what is said to be tuned at a rate has
    to be tuned at that rate.
    """
    steps = abs(math.log(rate))
    return math.expm1(steps / max(1, round(steps / math.log1p(0.01)))) if steps else 0.01


def _applied(policy: str, limits: Limits, setting: Setting) -> tuple[str, Limits]:
    """Return the spec and limits of a setting.  Raises ValueError for a name that neither has."""
    options = {name: value for name, value in setting.items() if name not in LIMITS}
    chosen = {
        name: option_value(name, value, int) for name, value in setting.items() if name in LIMITS
    }
    if not options:
        return policy, _limited(limits, chosen)
    try:
        spec = with_options(policy, options)
    except PolicySpecError as error:
        raise ValueError(f"{error}, and the replica has {', '.join(LIMITS)}") from error
    make_policy(spec)
    return spec, _limited(limits, chosen)


def _limited(limits: Limits, chosen: Mapping[str, object]) -> Limits:
    changes: dict[str, Any] = dict(chosen)
    return replace(limits, **changes)


def _score(trial: Trial) -> float:
    return trial.score
