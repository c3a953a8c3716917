"""The whole comparison: the heats and finals of a scenario, and an estimate of their time."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pandas as pd

from experiments.arena.contenders import Class, Entry
from experiments.arena.finals import Finals
from experiments.arena.heats import Settled, finalists, frame, settled, tune_all, tune_beside
from experiments.arena.results import Results
from experiments.arena.ring import OnReplay, Ring
from experiments.arena.scenarios import LOADS, Scale, Scenario
from experiments.command import provenance
from slosched.evaluate.capacity import Store, window
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import simulate
from slosched.workload import Trace

_SEARCH_RATES = 4
"""The estimated rates at which all windows are played for each target, after one found the knee."""
_SCOUT_RATES = 5
_TARGETS = 2
_SAMPLE = 150
"""The number of requests that are timed for the estimate."""


@dataclass(frozen=True)
class Tournament:
    """The contenders, their scale, and the place of the results."""

    entries: Sequence[Entry]
    scale: Scale
    results: Results
    store: Store
    jobs: int | None = None
    retuned: Collection[str] | None = None
    """Contenders that are tuned, while the others keep their settings; None for all."""

    def is_done(self, scenario: Scenario) -> bool:
        """Tell whether this code has measured the scenario with these contenders at this scale."""
        rows = self.results.of("runs", scenario.name).to_dict("records")
        if not rows:
            return False
        made, row = provenance("arena"), rows[0]
        return (row["code_digest"], row["scale"], row["contenders"]) == (
            made["code_digest"],
            self.scale.name,
            self._names,
        )

    def play(self, scenario: Scenario, on_replay: OnReplay = lambda: None) -> float:
        """Measure a scenario and store what was found; return the seconds that it took."""
        begin_s = time.monotonic()
        with Ring(scenario, self.scale, self.store, self.jobs, on_replay) as ring:
            tuned = self._tuned(ring)
            finals = Finals(ring, finalists(ring, tuned))
            tables = finals.tables()
            seconds = time.monotonic() - begin_s
            tables["runs"] = self._run_row(ring, finals, seconds)
        for kind, rows in tables.items():
            self.results.put(kind, scenario.name, rows)
        return seconds

    def num_replays(self) -> int:
        """Estimate the number of replays of each scenario."""
        scale = self.scale
        trials = sum(_num_trials(entry, scale) for entry in self.entries)
        references = 2 * (_SCOUT_RATES + _SEARCH_RATES * scale.num_tuning_windows)
        a_finalist = _TARGETS * (_SCOUT_RATES + _SEARCH_RATES * scale.num_windows)
        a_finalist += len(LOADS) * (scale.num_overload_windows + scale.num_bound_windows)
        return (
            references
            + (trials + len(self.entries)) * scale.num_tuning_windows
            + self._num_finalists * a_finalist
        )

    def estimate_s(self, scenario: Scenario, num_jobs: int) -> float:
        """Estimate the seconds that a scenario takes on idle cores, by playing some requests."""
        windows = scenario.tuning_windows(self.scale)
        model = scenario.device()
        config = scenario.config(model)
        sample = window(windows[0], min(_SAMPLE, len(windows[0])), seed=0)
        prompt_s = float(sum(model.predict_prefill(int(n)) for n in sample.prompt_tokens))
        busy = sample.scaled_to(len(sample) / prompt_s)
        seconds = {}
        for entry in self.entries:
            begin_s = time.process_time()  # other load on this machine does not count
            simulate(busy, make_policy(entry.policy), model, config)
            seconds[entry.name] = (time.process_time() - begin_s) / len(sample)
        scale, factor = self.scale, scenario.size_factor
        tuning = scale.num_tuning_windows * scale.tuning_requests * factor
        finals = _TARGETS * (_SCOUT_RATES + _SEARCH_RATES * scale.num_windows)
        judged = finals * scale.window_requests
        judged += len(LOADS) * scale.num_overload_windows * scale.overload_requests
        share = self._num_finalists / max(1, len(self.entries))
        total_s = sum(
            seconds[entry.name] * (_num_trials(entry, scale) * tuning + share * judged * factor)
            for entry in self.entries
        )
        return total_s / num_jobs

    @property
    def _names(self) -> str:
        return " ".join(entry.name for entry in self.entries)

    @property
    def _num_finalists(self) -> int:
        most = self.scale.num_finalists
        if most is None:
            return len(self.entries)
        groups = [entry.group for entry in self.entries]
        # The best at either of two rates go on, which are often the same.
        others = [min(2 * most, groups.count(group)) for group in Class if group is not Class.OURS]
        return sum(others) + groups.count(Class.OURS)

    def _tuned(self, ring: Ring) -> list[Settled]:
        if self.retuned is None:
            tuned = tune_all(ring, self.entries)
        else:
            tuned = self._tuned_beside(ring, self.retuned)
        self.results.put("tuned", ring.scenario.name, frame(ring.scenario.name, tuned))
        return tuned

    def _tuned_beside(self, ring: Ring, names: Collection[str]) -> list[Settled]:
        again = [entry for entry in self.entries if entry.name in names]
        others = [entry for entry in self.entries if entry.name not in names]
        kept = settled(self.results.of("tuned", ring.scenario.name), others)
        by_name = {one.entry.name: one for one in [*kept, *tune_beside(ring, kept, again)]}
        return [by_name[entry.name] for entry in self.entries]

    def _run_row(self, ring: Ring, finals: Finals, seconds: float) -> pd.DataFrame:
        scenario, scale = ring.scenario, self.scale
        knee_of, knee = finals.knee
        row: dict[str, object] = {
            "scenario": scenario.name,
            "scale": scale.name,
            "model": scenario.model,
            "trace": str(scenario.source),
            "promise": scenario.promise,
            "rule": scenario.rule.value,
            "judged_on": f"{_size(ring.windows)}, seeds 0 to {len(ring.windows) - 1}",
            "overloaded_on": f"{_size(ring.overload_windows)}, from seed 0 on",
            "tuned_on": f"{_size(ring.tuning_windows)}, seeds -1 to {-len(ring.tuning_windows)}",
            "bounds_on": _size(ring.bound_windows),
            "knee_of": knee_of,
            "knee_requests_per_s": knee,
            "num_replays": ring.num_replays,
            "seconds": round(seconds),
            "contenders": self._names,
            **provenance("arena"),
        }
        return pd.DataFrame([row])


def _size(windows: Sequence[Trace]) -> str:
    return f"{len(windows)} x {len(windows[0])}"


def _num_trials(entry: Entry, scale: Scale) -> int:
    return min(scale.max_trials, 1 + sum(len(values) - 1 for values in entry.values.values()))
