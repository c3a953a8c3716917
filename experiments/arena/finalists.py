"""The scenarios and their finalists for `slosched judge`, from the committed results.

Of each class the finalist is the one that serves most, in the mean of 1x and 2x the load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from experiments.arena.contenders import Class
from experiments.arena.results import Results
from experiments.arena.scenarios import SCENARIOS, MadeUp, Recorded, Scenario, Source
from slosched.evaluate.judge.scenarios import FILE

_KINDS = {
    "azure_conv_2023": "azure_conv",
    "azure_code_2023": "azure_code",
    "mooncake_conversation": "mooncake_conv",
}
"""The kinds of synthetic traces that are like the recorded ones."""
_OURS = "goodput"
_LONGER = {"relaxed": 2.0}
"""Under these promises a queue takes long to become a miss, so windows are so much longer."""
_LOADS = (1.0, 2.0)


def write(results: Results, path: Path = FILE) -> None:
    """Write the scenarios that have results, each with its finalists, as the judge reads them."""
    played = set(results.read("overload")["scenario"])
    found = {
        name: {**_described(scenario), "finalists": _finalists(results, name)}
        for name, scenario in SCENARIOS.items()
        if name in played
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _described(scenario: Scenario) -> dict[str, object]:
    return {
        "model": scenario.model,
        "requests": _requests(scenario.source),
        "promise": scenario.promise,
        "rule": scenario.rule,
        "size_factor": scenario.size_factor * _LONGER.get(scenario.promise, 1.0),
    }


def _requests(source: Source) -> dict[str, object]:
    if isinstance(source, Recorded):
        return {"kind": _KINDS[Path(source.file).stem], "poisson": source.is_poisson}
    assert isinstance(source, MadeUp)
    lengths = {"prompt": source.prompt, "output": source.output}
    return {
        "kind": "gamma",
        "arrivals_cv": source.cv,
        **{name: [length.mean_tokens, length.cv] for name, length in lengths.items()},
    }


def _finalists(results: Results, scenario: str) -> dict[str, Mapping[str, object]]:
    """Return the best of each class by its tuned spec, and the limits that were tuned with it."""
    load = results.of("overload", scenario)
    load = load[load["load"].isin(_LOADS)]
    share = load.groupby(["class", "contender"])["attainment"].mean()
    tuned = results.of("tuned", scenario).set_index("contender")
    return {
        group.value: _setting(tuned, _OURS if group is Class.OURS else str(share[group].idxmax()))
        for group in reversed(Class)
    }


def _setting(tuned: pd.DataFrame, contender: str) -> dict[str, object]:
    row = tuned.loc[contender]
    return {"policy": row["tuned"], "limits": json.loads(str(row["limits"]))}
