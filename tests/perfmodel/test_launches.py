"""Steps without a CUDA graph take as long as the host needs to launch their kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_steps import Chunks, make_measurements, make_shape, random_batches
from test_layered import REQUESTS, ROOFLINE, SEPARATE

from slosched.perfmodel import FITTERS, LayeredModel, Profile, fit, read_profile
from slosched.perfmodel.errors import evaluate
from slosched.perfmodel.forms import with_longer_steps
from slosched.perfmodel.graphs import GRAPH_SIZES, StepGraphs, with_graph_sizes
from slosched.perfmodel.launches import Launches

LAUNCH_S = 0.05
H100 = Path(__file__).parents[2] / "profiling/gpu/h100"
DEVICE = LayeredModel(ROOFLINE, REQUESTS, SEPARATE)
DECODES_ALONE = LayeredModel(ROOFLINE, REQUESTS, SEPARATE, launches=Launches(LAUNCH_S, 0, 64))
UP_TO_64 = LayeredModel(ROOFLINE, REQUESTS, SEPARATE, launches=Launches(LAUNCH_S, 64, 64))
ONE_DECODE: Chunks = ((1, 100),)
CHUNK_AND_DECODE: Chunks = ((16, 0), (1, 100))


@pytest.mark.parametrize(
    ("model", "batch", "has_graph"),
    [
        (DECODES_ALONE, ONE_DECODE, True),
        (DECODES_ALONE, ONE_DECODE * 64, True),
        (DECODES_ALONE, ONE_DECODE * 65, False),
        (DECODES_ALONE, CHUNK_AND_DECODE, False),
        (UP_TO_64, CHUNK_AND_DECODE, True),
        (UP_TO_64, ((64, 0), (1, 100)), False),
    ],
)
def test_a_step_without_a_graph_waits_for_its_launches(
    model: LayeredModel, batch: Chunks, has_graph: bool
) -> None:
    shape = make_shape(*batch)
    device_s = DEVICE.predict(shape)
    requests_s = float(REQUESTS.at(shape.num_reqs))
    expected_s = device_s if has_graph else LAUNCH_S + requests_s
    assert device_s < LAUNCH_S
    assert model.predict(shape) == pytest.approx(expected_s)


def test_a_step_that_takes_longer_than_its_launches_is_as_it_was() -> None:
    shape = make_shape((2048, 4096))
    assert DEVICE.predict(shape) > LAUNCH_S
    assert DECODES_ALONE.predict(shape) == DEVICE.predict(shape)


def test_longer_steps_are_longer_with_and_without_a_graph() -> None:
    longer = with_longer_steps(DECODES_ALONE, 0.01)
    for batch in (ONE_DECODE, CHUNK_AND_DECODE):
        shape = make_shape(*batch)
        assert longer.predict(shape) == pytest.approx(DECODES_ALONE.predict(shape) + 0.01)


@pytest.mark.parametrize("form", ["roofline", "profiled-separate"])
def test_a_fit_finds_the_launches(form: str) -> None:
    batches = [*random_batches(80), *(((1, 50 * n),) * n for n in range(1, 64, 3))]
    steps = make_measurements(batches, DECODES_ALONE, noise=0.02)
    judged = make_measurements(random_batches(60, seed=9), DECODES_ALONE)
    graphs = str(StepGraphs((*range(1, 65),), decodes_alone=True))
    model = FITTERS[form](steps, {GRAPH_SIZES: graphs}, 0)[0]
    assert isinstance(model, LayeredModel)
    assert model.launches is not None
    assert model.launches.launch_s == pytest.approx(LAUNCH_S, rel=0.03)
    assert (model.launches.most_tokens, model.launches.most_decodes) == (0, 64)
    unaware = FITTERS[form](steps, {}, 0)[0]
    assert evaluate(model, judged).mape < 3
    assert evaluate(unaware, judged).mape > 3 * evaluate(model, judged).mape


def test_launches_are_not_guessed_where_every_step_had_a_graph() -> None:
    steps = make_measurements([((n, 0), (1, 9)) for n in range(2, 60)], DEVICE)
    profile = with_graph_sizes(Profile(steps), "vllm", "roofline")
    model = FITTERS["roofline"](steps, profile.provenance, 0)[0]
    assert isinstance(model, LayeredModel)
    assert model.launches is None


def test_launches_explain_half_of_the_errors_on_an_h100() -> None:
    """The engine had graphs for decodes alone, and its host was slower than the GPU."""
    profile = read_profile(H100 / "profile-triton.csv")
    sizes = profile.provenance[GRAPH_SIZES]
    errors = [
        fit(with_graph_sizes(profile, text, "roofline"), "roofline").held_out.mape
        for text in ("none", f"decodes:{sizes}")
    ]
    assert errors[1] < 11
    assert errors[1] < 0.6 * errors[0]
