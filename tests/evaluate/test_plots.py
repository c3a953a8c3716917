"""Figures show the numbers they are given, in every corner case, without a display."""

import io
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from slosched.core import NO_SLO, SLO, DeadlineRule, EndReason, RequestStatus
from slosched.evaluate.metrics import RequestRecord, StepRow, summarize
from slosched.evaluate.plots import (
    decile_lines,
    fit_plot,
    goodput_bars,
    latency_cdfs,
    outcome_bars,
    timeline,
)

RULE = DeadlineRule.MEAN_TPOT
POLICIES = ("fcfs", "sarathi", "edf", "sjf", "slo_aware", "goodput", "qoserve", "slai", "sola")


def finished(i: int, ttft_s: float, tpot_s: float = 0.05, tokens: int = 4) -> RequestRecord:
    times = tuple(i + ttft_s + j * tpot_s for j in range(tokens))
    return RequestRecord(
        *(str(i), float(i), 10 * (i + 1), tokens, SLO(1.0, 0.1), RequestStatus.FINISHED),
        *(EndReason.STOP, times, times[-1]),
    )


def rejected(i: int) -> RequestRecord:
    return RequestRecord(
        *(str(i), float(i), 10 * (i + 1), 0, SLO(1.0, 0.1), RequestStatus.REJECTED),
        EndReason.EXPIRED,
    )


def step(start_s: float, duration_s: float, prefill: int, decodes: int, **more) -> StepRow:
    values = {"num_waiting": 1, "num_running": 2, "num_swapped": 0, "kv_used_fraction": 0.5}
    return StepRow(
        start_s, duration_s, None, prefill, decodes, **{**values, "num_rejected": 0, **more}
    )


REPLAYS = {
    "good": [finished(i, 0.5) for i in range(10)],
    "half": [finished(i, 0.5 if i % 2 else 5.0) for i in range(10)],
    "strict": [finished(i, 0.5) if i < 3 else rejected(i) for i in range(10)],
}
SUMMARIES = {name: summarize(replay, RULE) for name, replay in REPLAYS.items()}


def drawn(figure) -> bytes:
    """The figure as PNG; any warning on the way fails the test."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=50)
    return buffer.getvalue()


def texts(axes) -> list[str]:
    return [text.get_text().strip() for text in axes.texts]


def test_outcome_bars_split_the_offered_requests():
    figure = outcome_bars(SUMMARIES)
    widths = {
        container.get_label(): [patch.get_width() for patch in container]
        for container in figure.axes[0].containers
    }
    assert widths["good"] == pytest.approx([1.0, 0.5, 0.3])
    assert widths["late"] == pytest.approx([0.0, 0.5, 0.0])
    assert widths["rejected"] == pytest.approx([0.0, 0.0, 0.7])
    assert texts(figure.axes[0]) == ["100.0% good", "50.0% good", "30.0% good"]
    assert drawn(figure)


def test_goodput_bars_have_the_good_rates():
    figure = goodput_bars(SUMMARIES)
    assert texts(figure.axes[0]) == ["1.00", "0.50", "0.30"]
    assert drawn(figure)


def test_cdfs_end_at_the_share_that_got_a_token_and_show_the_slo():
    figure = latency_cdfs(REPLAYS)
    ttft_axes, tpot_axes = figure.axes
    ends = {line.get_label(): line.get_ydata()[-1] for line in ttft_axes.lines[:3]}
    assert ends == pytest.approx({"good": 1.0, "half": 1.0, "strict": 0.3})
    assert (texts(ttft_axes), texts(tpot_axes)) == (["SLO 1 s"], ["SLO 0.1 s"])
    assert drawn(figure)


def test_a_cdf_is_thinned_but_keeps_its_ends():
    replay = [finished(i, 0.001 * (i + 1)) for i in range(5000)]
    line = latency_cdfs({"fcfs": replay}).axes[0].lines[0]
    assert len(line.get_xdata()) <= 400
    assert line.get_xdata()[[0, -1]] == pytest.approx([0.001, 5.0])
    assert line.get_ydata()[[0, -1]] == pytest.approx([1 / 5000, 1.0])


def test_mixed_slos_draw_no_line():
    other = RequestRecord("x", 0.0, 1, 0, SLO(2.0, 0.2), RequestStatus.WAITING)
    figure = latency_cdfs({"fcfs": [finished(0, 0.5), other]})
    assert texts(figure.axes[0]) == texts(figure.axes[1]) == []


def test_decile_lines_are_the_attainments():
    line = decile_lines(REPLAYS, RULE).axes[0].lines[2]
    assert line.get_ydata().tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]


UNPROMISED = replace(rejected(0), slo=NO_SLO)


@pytest.mark.parametrize(
    "replay",
    [[rejected(0), rejected(1)], [UNPROMISED, rejected(1)], [finished(0, 0.5, tokens=1)]],
)
def test_replays_with_nothing_to_rank_are_drawn_all_the_same(replay):
    summaries = {"fcfs": summarize(replay, RULE)}
    for figure in (
        outcome_bars(summaries),
        goodput_bars(summaries),
        latency_cdfs({"fcfs": replay}),
        decile_lines({"fcfs": replay}, RULE),
    ):
        assert drawn(figure)


def test_many_policies_stay_apart():
    figure = latency_cdfs(dict.fromkeys(POLICIES, REPLAYS["half"]))
    lines = figure.axes[0].lines[: len(POLICIES)]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(POLICIES)
    assert drawn(figure)


def test_no_policy_is_an_error():
    for draw in (outcome_bars, goodput_bars, latency_cdfs):
        with pytest.raises(ValueError, match="no policy"):
            draw({})


def heights(collection) -> np.ndarray:
    """Upper minus lower edge of a filled area, sampled by its vertices."""
    return np.array(collection.get_paths()[0].vertices)[:, 1]


def test_a_timeline_averages_over_time_and_tokens_over_steps():
    """Two steps of 1 s with 2 s of idleness between: queues see the idleness, tokens do not."""
    steps = [step(0, 1, 100, 10, num_running=4), step(3, 1, 0, 20, num_running=8, num_rejected=2)]
    figure = timeline(steps)
    batch_axes, queue_axes, kv_axes = figure.axes
    decode, total = batch_axes.collections
    # Two bins of 2 s.
    assert set(heights(decode)) == {0, 10, 20}
    assert heights(total).max() == 110
    running = queue_axes.lines[0]
    assert running.get_ydata().tolist() == [2, 4, 4]
    assert kv_axes.lines[0].get_xdata().tolist() == [3]
    assert drawn(figure)


def test_a_long_timeline_is_binned_and_keeps_its_area():
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.exponential(0.01, 20_000))
    starts = np.concatenate([[0], ends[:-1]])
    steps = [
        step(a, b - a, 64, 8, num_running=int(n))
        for a, b, n in zip(starts, ends, rng.integers(0, 256, len(ends)), strict=True)
    ]
    running = timeline(steps).axes[1].lines[0]
    assert len(running.get_xdata()) == 401
    area = (running.get_ydata()[:-1] * np.diff(running.get_xdata())).sum()
    assert area == pytest.approx(sum(s.duration_s * s.num_running for s in steps))


def test_a_timeline_of_steps_without_length_or_of_none():
    assert drawn(timeline([step(0, 0.5, 10, 0)]))
    with pytest.raises(ValueError, match="no steps"):
        timeline([])


def test_the_fit_plot_states_the_error():
    measured = np.array([0.01, 0.02, 0.04])
    figure = fit_plot(measured * [1.1, 0.9, 1.0], measured)
    assert figure.axes[1].get_title() == "mean |error| 6.67%, n = 3"
    assert drawn(figure)
    assert drawn(fit_plot([0.01], [0.01]))


def test_the_fit_plot_has_a_row_of_errors_for_each_group():
    measured = np.array([0.01, 0.02, 0.04])
    figure = fit_plot(measured, measured, {"decode": [0, 1], "mixed": [2]})
    rows = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert rows == ["all (3)", "decode (2)", "mixed (1)"]
    assert drawn(figure)


@pytest.mark.parametrize(
    ("predicted", "measured"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0]), ([np.nan], [1.0])]
)
def test_the_fit_plot_refuses_what_it_cannot_draw(predicted, measured):
    with pytest.raises(ValueError, match="fit_plot needs"):
        fit_plot(predicted, measured)


def test_drawing_never_imports_pyplot():
    code = (
        "import sys, slosched.evaluate.plots, slosched.evaluate.report;"
        "sys.exit('matplotlib.pyplot' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
