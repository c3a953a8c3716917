"""The errors of the forms on measured kernel times of three GPUs and models.

LLMServingSim's tables (`shared/data/llmservingsim`) have one attention measurement for each of some
ten thousand batches. The steps composed from them are the ground truth here, as in
`benchmarks/latency_model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scripts import load_script

from slosched.perfmodel import FITTERS, FittedModel, LayeredModel, Measurement, Part
from slosched.perfmodel.columns import Columns
from slosched.perfmodel.errors import ErrorReport, evaluate, report_errors
from slosched.perfmodel.split import covering, on_grid

ROOT = Path(__file__).parents[2]
PERF = ROOT.parent / "shared" / "data" / "llmservingsim"
NUM_TRAINED = 160
NUM_JUDGED = 3000
NAMES = ("rtx4090/llama-3.1-8b", "rtxpro6000/llama-3.1-8b", "rtxpro6000/qwen3-32b")
FIRST_ALONE = [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
"""One device on every commit, and the others in `make test-slow`."""

pytestmark = pytest.mark.skipif(
    not PERF.exists(), reason=f"LLMServingSim's tables are not at {PERF}"
)


@cache
def compose() -> ModuleType:
    """Import profiling/llmservingsim/compose.py, a script that is in no package."""
    return load_script("profiling/llmservingsim/compose.py")


@dataclass(frozen=True)
class Device:
    """The steps of one GPU and model, and models that were fitted to some of them."""

    source: Any
    layers: list[Measurement]
    steps: list[Measurement]
    provenance: dict[str, str]

    def fitted(self, form: str, steps: Sequence[Measurement]) -> FittedModel:
        train = [steps[i] for i in covering(steps, NUM_TRAINED)]
        assert len(train) <= NUM_TRAINED
        return FITTERS[form]([*self.layers, *train], self.provenance, 0)[0]


@cache
def device(name: str) -> Device:
    source = next(s for s in compose().SOURCES if s.name == name)
    profile = compose().compose(source, PERF)
    parts: dict[Part, list[Measurement]] = {part: [] for part in Part}
    for m in profile.measurements:
        parts[m.part].append(m)
    return Device(source, parts[Part.LAYERS], parts[Part.STEP], dict(profile.provenance))


@cache
def on_a_random_split(name: str, form: str) -> FittedModel:
    return device(name).fitted(form, device(name).steps)


def errors(model: FittedModel, steps: Sequence[Measurement]) -> ErrorReport:
    """Judge at most `NUM_JUDGED` random steps, since computing shapes takes a while."""
    drawn = np.random.default_rng(0).permutation(len(steps))[:NUM_JUDGED]
    chosen = [steps[i] for i in drawn]
    if not isinstance(model, LayeredModel):
        return evaluate(model, chosen)
    return report_errors(model.column_seconds(Columns([m.shape for m in chosen])), chosen)


def off_grid_errors(name: str, form: str) -> ErrorReport:
    steps = device(name).steps
    model = device(name).fitted(form, [m for m in steps if on_grid(m)])
    return errors(model, [m for m in steps if not on_grid(m)])


@pytest.mark.parametrize("name", FIRST_ALONE)
def test_a_random_split(name: str) -> None:
    """The 160 fitted steps are among the some ten thousand that judge, too."""
    joint = errors(on_a_random_split(name, "profiled-joint"), device(name).steps)
    assert joint.mape <= 2.0
    assert joint.p99 <= 10.5
    linear = errors(on_a_random_split(name, "linear"), device(name).steps)
    assert linear.mape > 4 * joint.mape
    assert linear.p99 > 3 * joint.p99


@pytest.mark.parametrize("name", [NAMES[1], pytest.param(NAMES[2], marks=pytest.mark.slow)])
def test_off_the_grid_of_powers_of_two(name: str) -> None:
    """The fit sees powers of two only; the judging batches have up to more than 200k tokens."""
    joint = off_grid_errors(name, "profiled-joint")
    assert joint.mape <= 2.5
    assert joint.p99 <= 12.5
    assert off_grid_errors(name, "linear").mape > 4 * joint.mape


def test_the_largest_caches_lie_off_the_grid() -> None:
    sizes = [
        m.shape.decode_context_tokens + m.shape.prefill_context_tokens
        for m in device("rtxpro6000/llama-3.1-8b").steps
        if not on_grid(m)
    ]
    assert max(sizes) > 200_000


@pytest.mark.parametrize(
    ("name", "mape", "p99"),
    [
        ("rtx4090/llama-3.1-8b", 2.6, 9.0),
        pytest.param("rtxpro6000/llama-3.1-8b", 3.1, 20.0, marks=pytest.mark.slow),
        pytest.param("rtxpro6000/qwen3-32b", 2.5, 8.0, marks=pytest.mark.slow),
    ],
)
def test_decodes_of_unequal_context_which_no_fit_saw(name: str, mape: float, p99: float) -> None:
    steps = compose().compose_skewed(device(name).source, PERF)
    joint = errors(on_a_random_split(name, "profiled-joint"), steps)
    assert joint.mape <= mape
    assert joint.p99 <= p99
    assert errors(on_a_random_split(name, "linear"), steps).mape > 2 * joint.mape


@pytest.mark.parametrize("name", FIRST_ALONE)
def test_unequal_contexts_of_decodes_alone_are_learnt_from_forty_steps(name: str) -> None:
    """They take up to 41 % longer than equal ones, where keys are not split.  The rest judges."""
    skewed = compose().compose_skewed(device(name).source, PERF)
    alone = [m for m in skewed if not m.shape.num_prefills]
    chosen = set(covering(alone, 40))
    others = [m for i, m in enumerate(alone) if i not in chosen]
    equal = [device(name).steps[i] for i in covering(device(name).steps, NUM_TRAINED)]
    steps = [*device(name).layers, *equal, *(alone[i] for i in chosen)]
    learnt = FITTERS["profiled-joint"](steps, device(name).provenance, 0)[0]
    before = on_a_random_split(name, "profiled-joint")
    judged, was = errors(learnt, others), errors(before, others)
    assert judged.mape < 0.45 * was.mape
    assert judged.mape < 1.0
    assert judged.p99 < 5.5
    seen = {m.chunks for m in equal}
    alike = [m for m in device(name).steps if not m.shape.num_prefills and m.chunks not in seen]
    assert errors(learnt, alike).mape < 0.8 * errors(before, alike).mape, "equal contexts, too"
