"""The online model: 1 % of the steps exceed its upper quantile, and its bias follows the device.

The replayed steps have the shapes of real traces.  The device is a fitted GPU with noise, drift and
stalls. The base model has another form, and errs by some 10 % on its own.
"""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from factories import make_model
from hypothesis import given
from hypothesis import strategies as st
from machine import slowed

from slosched.core import BatchShape, LatencyModel, Limits
from slosched.engine.loop import StepRecord
from slosched.perfmodel import LinearCoefficients, LinearModel, OnlineModel
from slosched.perfmodel.online import Regime
from slosched.policy import Sarathi
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import read_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
DEVICE = LinearModel(
    LinearCoefficients(2.38e-5, 4.99e-9, 1.96e-7, 2.65e-3, 1.54e-4, 0.0, 1.42e-2),
    held_out_error={"under_p99": 12.0},
)
"""An RTX 4090 with Llama-3.1-8B."""
DECODES, MIXED = BatchShape(), BatchShape()
DECODES.add_decodes([700] * 32)
MIXED.add_decodes([700] * 32)
MIXED.add(480, 1000)


class RuleOfThumb:
    """A device that reads weights or computes tokens, whichever is slower, and reads the cache."""

    def predict(self, shape: BatchShape) -> float:
        if not shape.num_tokens:
            return 0.0
        tokens_s = max(15e-3, 60e-6 * shape.num_tokens)
        return tokens_s + 1.8e-7 * (shape.decode_context_tokens + shape.prefill_context_tokens)

    def predict_upper(self, shape: BatchShape) -> float:
        """Return an upper bound without a margin, since nothing is known of the model's error."""
        return self.predict(shape)

    def predict_prefill(self, num_new_tokens: int, num_prior_tokens: int = 0) -> float:
        shape = BatchShape()
        shape.add(num_new_tokens, num_prior_tokens)
        return self.predict(shape)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


def steady(share: float) -> float:
    return 1.0


def steps_up_and_down(share: float) -> float:
    return 1.2 if 1 / 3 <= share < 2 / 3 else 0.8 if share >= 2 / 3 else 1.0


def ramp(share: float) -> float:
    return 0.8 + 0.4 * share


def sine(share: float) -> float:
    """Return three periods of a sine, each of some two minutes."""
    return 1 + 0.2 * math.sin(6 * math.pi * share)


@cache
def replayed(trace: str, rate: float) -> list[BatchShape]:
    """Return the shapes of all steps of 800 requests."""
    path = TRACES / trace
    if not path.exists():
        pytest.skip(f"{path} is not there: the shared folder holds the traces")
    shapes: list[BatchShape] = []

    def note(record: StepRecord) -> None:
        if record.batch.chunks:
            shapes.append(record.batch.shape.copy())

    config = SimulationConfig(Limits(max_num_batched_tokens=512, max_num_seqs=128), num_blocks=4000)
    simulate(
        read_trace(path).head(800).scaled_to(rate),
        Sarathi(),
        DEVICE,
        config,
        on_step=note,
    )
    return shapes


@dataclass(frozen=True)
class Outcome:
    """The results of a replay; each array has one entry for each step."""

    is_over: np.ndarray
    has_prefill: np.ndarray
    margin: np.ndarray
    error: np.ndarray
    """|measured / predicted - 1|."""

    def coverage(self, which: np.ndarray | slice) -> float:
        return 100 * float(1 - self.is_over[which].mean())


def play(
    shapes: list[BatchShape],
    device: LatencyModel,
    model: LatencyModel,
    *,
    drift: Callable[[float], float] = steady,
    noise: float = 0.0,
    stalls: float = 0.0,
    seed: int = 0,
) -> Outcome:
    """Predict each step, run it, then learn from it."""
    rng = np.random.default_rng(seed)
    factors = rng.lognormal(0.0, noise, len(shapes)) * np.where(
        rng.random(len(shapes)) < stalls, 10.0, 1.0
    )
    rows = []
    for i, shape in enumerate(shapes):
        took_s = device.predict(shape) * drift(i / len(shapes)) * float(factors[i])
        expected_s, upper_s = model.predict(shape), model.predict_upper(shape)
        rows.append(
            (
                took_s > upper_s,
                shape.num_prefills > 0,
                upper_s / expected_s,
                abs(took_s / expected_s - 1),
            )
        )
        model.observe(shape, took_s)
    is_over, has_prefill, margin, error = (np.array(column) for column in zip(*rows, strict=True))
    return Outcome(is_over, has_prefill, margin, error)


@pytest.mark.parametrize("stalls", [0.0, 0.005])
@pytest.mark.parametrize("drift", [steady, steps_up_and_down, ramp, sine])
@pytest.mark.parametrize(
    ("trace", "rate"),
    [
        pytest.param("azure_conv_2023.csv", 3.0, marks=pytest.mark.slow),
        ("azure_code_2023.csv", 1.5),
    ],
)
def test_one_step_in_a_hundred_exceeds_the_upper_bound(
    trace: str, rate: float, drift: Callable[[float], float], stalls: float
) -> None:
    shapes = replayed(trace, rate)
    model = OnlineModel(RuleOfThumb())
    played = play(shapes, DEVICE, model, drift=drift, noise=0.05, stalls=stalls)
    assert len(shapes) > 5000
    assert 98.5 <= played.coverage(slice(None)) <= 99.5
    assert played.coverage(slice(100)) >= 95.0
    assert 98.3 <= played.coverage(played.has_prefill) <= 99.7
    assert 98.3 <= played.coverage(~played.has_prefill) <= 99.7
    for begin in range(0, len(shapes) - 1000, 1000):
        assert 97.5 <= played.coverage(slice(begin, begin + 1000)) <= 99.9
    # Noise of 5 % needs a margin of 12.3 %, and of 13.7 % with stalls of 0.5 % in addition.
    assert np.median(played.margin) <= 1.22
    assert model.coverage == pytest.approx(played.coverage(slice(None)) / 100, abs=1e-3)


def test_a_fitted_model_as_it_is_does_not_cover() -> None:
    """The upper bound of a fitted model is too low under drift, which the online model corrects."""
    shapes = replayed("azure_conv_2023.csv", 3.0)
    drifting = play(shapes, DEVICE, DEVICE, drift=sine, noise=0.05)
    assert drifting.coverage(slice(None)) < 90


@pytest.mark.parametrize("slowdown", [0.5, 0.8, 1.25, 2.0])
def test_a_lasting_change_is_followed_within_sixty_steps(slowdown: float) -> None:
    device = make_model()
    model = OnlineModel(device)
    play([DECODES] * 500, device, model, noise=0.03)
    play([DECODES] * 60, device, model, drift=lambda _: slowdown, noise=0.03, seed=1)
    assert model.predict(DECODES) / device.predict(DECODES) == pytest.approx(slowdown, rel=0.05)


@pytest.mark.parametrize("noise", [0.05, 0.15])
def test_the_first_steps_with_prompts_are_covered_by_what_those_of_decodes_have_shown(
    noise: float,
) -> None:
    """The rule that it learns by has hardly seen one step in a hundred by then."""
    device, num_over = make_model(), 0
    for seed in range(20):
        model = OnlineModel(device)
        play([DECODES] * 20, device, model, noise=noise, seed=2 * seed)
        first = play([MIXED] * 20, device, model, noise=noise, seed=2 * seed + 1)
        num_over += int(first.is_over.sum())
    assert num_over <= 0.03 * 20 * 20


@pytest.mark.parametrize("stall", [10.0, 100.0, math.inf])
@pytest.mark.parametrize(
    ("num_steps", "moved", "widened"), [(0, 0.06, 0.25), (1, 0.06, 0.25), (500, 0.02, 0.05)]
)
def test_a_stalled_step_hardly_moves_it(
    num_steps: int, moved: float, widened: float, stall: float
) -> None:
    device = make_model()
    model = OnlineModel(device)
    play([DECODES] * num_steps, device, model, noise=0.03) if num_steps else None
    before_s, before_upper_s = model.predict(DECODES), model.predict_upper(DECODES)
    model.observe(DECODES, stall * device.predict(DECODES))
    assert 1 <= model.predict(DECODES) / before_s <= 1 + moved
    assert 1 <= model.predict_upper(DECODES) / before_upper_s <= 1 + widened


def test_stalls_that_come_again_and_again_do_not_poison_the_bias() -> None:
    device = make_model()
    model = OnlineModel(device)
    played = play([DECODES] * 4000, device, model, noise=0.03, stalls=0.03)
    assert np.median(played.error[500:]) < 0.03
    assert model.regimes[Regime.DECODE].bias == pytest.approx(1, abs=0.05)


def test_a_regime_that_is_rare_follows_the_other() -> None:
    device = make_model()
    model = OnlineModel(device)
    for _ in range(200):
        model.observe(DECODES, 1.3 * device.predict(DECODES))
    assert model.predict(MIXED) / device.predict(MIXED) > 1.2
    assert model.predict_prefill(1000) / device.predict_prefill(1000) > 1.2


@pytest.mark.parametrize(("decode", "prefill"), [(1.0, 1.25), (1.0, 0.85), (0.8, 1.2), (1.2, 0.9)])
@pytest.mark.parametrize("every", [2, 10])
def test_each_regime_has_its_own_bias(decode: float, prefill: float, every: int) -> None:
    device = make_model()
    model = OnlineModel(device)
    for i in range(200 * every):
        shape, factor = (MIXED, prefill) if i % every == 0 else (DECODES, decode)
        model.observe(shape, factor * device.predict(shape))
    assert model.predict(DECODES) / device.predict(DECODES) == pytest.approx(decode, rel=0.03)
    assert model.predict(MIXED) / device.predict(MIXED) == pytest.approx(prefill, rel=0.04)


def heavy_tails(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield float(0.8 + rng.pareto(5.0))


def bursts(rng: np.random.Generator) -> Iterator[float]:
    """Yield factors at levels that change after hundreds of steps."""
    while True:
        level = float(rng.uniform(0.5, 2.0))
        for _ in range(int(rng.integers(100, 500))):
            yield level * float(rng.lognormal(0, 0.02))


@pytest.mark.parametrize("weather", [heavy_tails, bursts])
def test_the_share_of_misses_is_bounded_whatever_the_steps_do(
    weather: Callable[[np.random.Generator], Iterator[float]],
) -> None:
    """The bound is |misses / N - 1 %| <= log(m_max / m_min) / (0.1 N).

    It follows from the arithmetic of the tracker, while the margin stays inside its limits.
    """
    device = make_model()
    model = OnlineModel(device)
    num_steps = 20_000
    factors = weather(np.random.default_rng(0))
    over = 0
    for _ in range(num_steps):
        took_s = next(factors) * device.predict(DECODES)
        over += took_s > model.predict_upper(DECODES)
        model.observe(DECODES, took_s)
    bound = math.log(math.log(4.0) / 0.002) / (0.1 * num_steps)
    assert abs(over / num_steps - 0.01) <= bound


chunks = st.tuples(st.integers(2, 300), st.integers(0, 16_384))
decodes = st.tuples(st.just(1), st.integers(0, 16_384))
coefficients = st.builds(  # as on real devices, where a batch of decodes outweighs a chunk
    LinearCoefficients,
    *(
        st.floats(0, most, allow_subnormal=False)
        for most in (1e-4, 1e-8, 1e-6, 1e-3, 1e-3, 1e-4, 2e-2)
    ),
)
factors = st.floats(0.1, 10.0)


@given(
    coefficients,
    st.lists(st.tuples(factors, factors, st.integers(1, 30)), max_size=4),
    st.lists(decodes, max_size=6),
    st.lists(chunks, max_size=2),
    st.integers(0, 50),
    st.one_of(decodes, chunks),
    st.integers(0, 50),
)
def test_adding_to_a_shape_never_makes_it_faster(
    base: LinearCoefficients,
    history: list[tuple[float, float, int]],
    batch: list[tuple[int, int]],
    more: list[tuple[int, int]],
    num_swapped_blocks: int,
    added: tuple[int, int],
    num_added_blocks: int,
) -> None:
    """The prediction must not fall even when a first chunk joins decodes and changes the regime."""
    model = OnlineModel(LinearModel(base))
    for decode, prefill, num_steps in history:
        for _ in range(num_steps):
            model.observe(DECODES, decode * model.base.predict(DECODES))
            model.observe(MIXED, prefill * model.base.predict(MIXED))
    shape = BatchShape()
    for new, prior in (*batch, *more):
        shape.add(new, prior)
    shape.num_swapped_blocks = num_swapped_blocks
    before_s, before_upper_s = model.predict(shape), model.predict_upper(shape)
    shape.add(*added)
    shape.num_swapped_blocks += num_added_blocks
    assert model.predict(shape) >= before_s * (1 - 1e-12)
    assert model.predict_upper(shape) >= before_upper_s * (1 - 1e-12)
    assert model.predict_upper(shape) >= model.predict(shape)


def test_a_small_chunk_takes_at_least_the_time_of_the_decodes_that_it_joins() -> None:
    """Prefills run faster than the base model predicts, and a small chunk joins decodes."""
    device = make_model(any_decode_s=0.0)
    model = OnlineModel(device)
    for _ in range(300):
        model.observe(DECODES, 1.2 * device.predict(DECODES))
        model.observe(MIXED, 0.7 * device.predict(MIXED))
    shape = DECODES.copy()
    shape.add(2, 0)
    assert model.regimes[Regime.PREFILL].bias < 0.75
    assert model.predict(shape) >= model.predict(DECODES)
    for contexts in ([300, 500], [400, 400], [800], [800, 0]):  # not those that the model has kept
        with_chunk, without = shape.copy(), DECODES.copy()
        with_chunk.add_decodes(contexts)
        without.add_decodes(contexts)
        assert model.predict(with_chunk) >= model.predict(without) > model.predict(DECODES)


def test_a_chunk_costs_something_beside_decodes_that_verify_drafts() -> None:
    """The decodes that a step is compared with verify their draft tokens, too."""
    device = make_model()
    model = OnlineModel(device)
    for _ in range(300):
        model.observe(DECODES, 1.2 * device.predict(DECODES))
        model.observe(MIXED, 0.7 * device.predict(MIXED))
    for num_drafts in (0, 8, 4):  # the contexts stay, so that only the drafts tell them apart
        drafting = DECODES.copy()
        drafting.num_draft_tokens = num_drafts * drafting.num_decodes
        with_chunk = drafting.copy()
        with_chunk.add(2, 0)
        assert model.predict(with_chunk) >= model.predict(drafting)
        assert model.predict_upper(with_chunk) >= model.predict_upper(drafting)


@pytest.mark.parametrize("chunk", [(1, 0), (1, 700), (2, 0), (500, 0), (500, 1000)])
def test_a_prefill_alone_follows_the_bias_though_it_is_cached(chunk: tuple[int, int]) -> None:
    device = make_model()
    model = OnlineModel(device)
    shape = BatchShape()
    shape.add(*chunk)
    for factor in (1.5, 0.7):
        for _ in range(20):
            model.observe(DECODES, factor * device.predict(DECODES))
            model.observe(MIXED, 1.1 * factor * device.predict(MIXED))
        assert model.predict_prefill(*chunk) == pytest.approx(model.predict(shape))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_step_without_a_time_teaches_nothing(seconds: float) -> None:
    model = OnlineModel(make_model())
    before_s = model.predict(DECODES)
    model.observe(DECODES, seconds)
    model.observe(BatchShape(), 1.0)
    assert model.predict(DECODES) == before_s
    assert model.coverage is None


def test_it_starts_where_the_base_model_ended() -> None:
    base = LinearModel(make_model().coefficients, held_out_error={"under_p99": 20.0})
    model = OnlineModel(base)
    assert model.predict(MIXED) == base.predict(MIXED)
    assert model.predict_upper(MIXED) == pytest.approx(base.predict(MIXED) / 0.8)
    unknown = OnlineModel(make_model())
    assert unknown.predict_upper(MIXED) == pytest.approx(1.25 * unknown.predict(MIXED))


def test_the_same_steps_teach_the_same() -> None:
    device = make_model()
    first, second = (OnlineModel(device) for _ in range(2))
    for model in (first, second):
        play([DECODES, MIXED] * 200, device, model, noise=0.1, stalls=0.01)
    assert first.predict_upper(MIXED) == second.predict_upper(MIXED)
    assert first.predict(DECODES) == second.predict(DECODES)


def test_it_does_not_wrap_itself() -> None:
    with pytest.raises(ValueError, match="must be a fixed model"):
        OnlineModel(OnlineModel(make_model()))


@pytest.mark.cost
@pytest.mark.parametrize("shape", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_its_price(shape: BatchShape) -> None:
    """The times are in addition to the base's 0.5 µs; the bounds leave room on a busy machine."""
    base = make_model()
    model = OnlineModel(base)
    took_s = 1.1 * base.predict(shape)

    def best_s(statement: Callable[[], object]) -> float:
        return min(timeit.repeat(statement, number=5000, repeat=9)) / 5000

    base_s = best_s(lambda: base.predict(shape))
    assert best_s(lambda: model.predict(shape)) - base_s < slowed(1e-6)
    assert best_s(lambda: model.predict_upper(shape)) - base_s < slowed(1e-6)
    assert best_s(lambda: model.observe(shape, took_s)) < slowed(6e-6)
