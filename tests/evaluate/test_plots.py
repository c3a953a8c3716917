"""Tests that figures show the numbers they are given, in every corner case, without a display."""

import io
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from slosched.core import NO_SLO, SLO, DeadlineRule, EndReason, RequestStatus
from slosched.evaluate.plots import (
    cost_frontier,
    decile_lines,
    fit_plot,
    gap_tails,
    goodput_bars,
    latency_cdfs,
    outcome_bars,
    replicas_over_time,
    tier_bars,
    timeline,
)
from slosched.evaluate.plots.style import COLOURS, look
from slosched.fleet.scaling import Lease
from slosched.metrics import RequestRecord, StepRow, summarize

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
    """Return the figure as PNG; any warning on the way fails the test."""
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


LONG_NAMES = [
    f"goodput:margin=0.1{i},fairness=0.5,min_share=0.1+early_rejection behind "
    "prefix_affine:overlap_weight=2 scaled by kv_use"
    for i in range(8)
]


@pytest.mark.parametrize("draw", [outcome_bars, goodput_bars, latency_cdfs, gap_tails])
def test_long_names_are_folded_and_stay_inside(draw):
    """Draw policies with options behind a router and with a scaler, as `compare` names them."""
    is_of_summaries = draw in (outcome_bars, goodput_bars)
    of = SUMMARIES["half"] if is_of_summaries else REPLAYS["half"]
    figure = draw(dict.fromkeys(LONG_NAMES, of))
    assert drawn(figure)
    shown = figure.axes[0].get_yticklabels() if is_of_summaries else figure.legends[0].get_texts()
    assert ["".join(label.get_text().split()) for label in shown] == [
        "".join(name.split()) for name in LONG_NAMES
    ]
    page = figure.bbox
    for label in shown:
        box = label.get_window_extent()
        assert page.x0 <= box.x0 < box.x1 <= page.x1
        assert page.y0 <= box.y0 < box.y1 <= page.y1
    assert figure.axes[0].get_window_extent().height > 0.3 * 3.6 * figure.dpi


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
    assert line.get_ydata()[[0, 1, -1]] == pytest.approx([0, 1 / 5000, 1.0])


def test_curves_of_one_request_can_be_seen():
    replay = {"fcfs": [finished(0, 0.5, tokens=2)]}
    for axes, last_s in zip(latency_cdfs(replay).axes, (0.5, 0.05), strict=True):
        curve = axes.lines[0]
        assert curve.get_xdata() == pytest.approx([last_s, last_s])
        assert curve.get_ydata() == pytest.approx([0, 1])
    assert gap_tails(replay).axes[0].lines[0].get_markevery() is None, "its one point is marked"


def test_every_policy_has_its_row_even_without_a_rate():
    alone = [finished(0, 0.5)]
    figure = goodput_bars({name: summarize(alone, RULE) for name in ("a", "b")})
    (axes,) = figure.axes
    assert texts(axes) == ["no rate: all arrived at once"] * 2
    assert axes.get_ylim() == (1.5, -0.5)
    assert drawn(figure)


@pytest.mark.parametrize("ttft_s", [0.001, 0.99, 5000.0])
def test_the_promise_is_written_within_its_panel(ttft_s):
    figure = latency_cdfs({"fcfs": [finished(i, ttft_s / (i + 1)) for i in range(10)]})
    drawn(figure)
    axes = figure.axes[0]
    text, panel = axes.texts[0].get_window_extent(), axes.get_window_extent()
    assert panel.x0 <= text.x0 < text.x1 <= panel.x1


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
        gap_tails({"fcfs": replay}),
        tier_bars({"fcfs": replay}, RULE),
        decile_lines({"fcfs": replay}, RULE),
    ):
        assert drawn(figure)


@pytest.mark.parametrize("draw", [latency_cdfs, gap_tails, lambda r: decile_lines(r, RULE)])
def test_curves_are_told_apart_without_colour(draw):
    """Check that dash and marker identify the policy, in every panel and in the legend."""
    figure = draw(dict.fromkeys(POLICIES, REPLAYS["half"]))
    for axes in figure.axes:
        lines = [line for line in axes.lines if not line.get_label().startswith("_")]
        assert [line.get_label() for line in lines] == list(POLICIES)
        looks = {(str(line._unscaled_dash_pattern), line.get_marker()) for line in lines}
        assert len(looks) == len(POLICIES)
        assert not any(line.get_marker() in ("", "None") for line in lines)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(POLICIES)
    assert drawn(figure)


def test_pairs_of_dash_and_marker_repeat_only_after_42_curves():
    looks = [look(i) for i in range(42)]
    assert len({(str(one.dash), one.marker) for one in looks}) == 42


def lightness(colour: str) -> float:
    """Return CIE L* of a colour, its lightness in grey from 0 to 100."""
    channels = np.array(to_rgb(colour))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(116 * np.cbrt(linear @ [0.2126, 0.7152, 0.0722]) - 16)


def test_neighbours_differ_in_lightness_and_all_stand_out_from_white():
    for i, colour in enumerate(COLOURS[:-1]):
        assert abs(lightness(colour) - lightness(COLOURS[i + 1])) > 3
        assert lightness(colour) < 75
    assert min(abs(lightness(COLOURS[i]) - lightness(COLOURS[i + 1])) for i in range(4)) > 15


def test_bars_are_told_apart_without_colour():
    figure = tier_bars(dict.fromkeys(POLICIES[:5], REPLAYS["half"]), RULE)
    hatches = [container[0].get_hatch() for container in figure.axes[0].containers]
    assert len(set(hatches)) == 5


def test_tier_bars_are_the_attainments_of_each_promise():
    chat, batch = SLO(0.6, 0.1), SLO(6.0, 0.1)
    replay = [replace(finished(i, 0.5 if i < 6 else 2.0), slo=chat) for i in range(8)]
    figure = tier_bars({"edf": [*replay, *(replace(r, slo=batch) for r in replay)]}, RULE)
    (bars,) = figure.axes[0].containers
    assert [bar.get_height() for bar in bars] == pytest.approx([0.75, 1.0])
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["600 ms, 100 ms/token\n8 requests", "6 s, 100 ms/token\n8 requests"]
    assert drawn(figure)


def test_tier_bars_count_the_requests_of_a_promise_that_only_another_replay_has():
    replay = [replace(finished(i, 0.5), slo=SLO(0.6 + i % 2, 0.1)) for i in range(8)]
    recorded = [replace(record, slo=SLO(9.0, 0.1)) for record in replay[:5]]
    figure = tier_bars({"edf": replay, "live": recorded}, RULE)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert [text.partition("\n")[2] for text in labels] == [
        "4 requests",
        "4 requests",
        "5 requests",
    ]


def test_the_tail_of_gaps_is_the_share_that_is_as_long_or_longer():
    """Draw eight gaps of 50 ms and one of 0.4 s."""
    slow = replace(finished(0, 0.5), token_times_s=(0.5, 0.9), num_output_tokens=2)
    line = gap_tails({"edf": [finished(0, 0.5, tokens=9), slow]}).axes[0].lines[0]
    shares = dict(zip(np.round(line.get_xdata(), 3), line.get_ydata(), strict=True))
    assert shares[0.05] == pytest.approx(2 / 9)  # the ninth of nine is the longest, the last 0.05
    assert shares[0.4] == pytest.approx(1 / 9)
    assert line.get_ydata().max() == 1.0


def test_no_policy_is_an_error():
    for draw in (outcome_bars, goodput_bars, latency_cdfs, gap_tails):
        with pytest.raises(ValueError, match="no policy"):
            draw({})


def heights(collection) -> np.ndarray:
    """Return upper minus lower edge of a filled area, sampled by its vertices."""
    return np.array(collection.get_paths()[0].vertices)[:, 1]


def test_a_timeline_averages_over_time_and_tokens_over_steps():
    """Draw two steps of 1 s with 2 s idle between them, which count for queues, not for tokens."""
    steps = [step(0, 1, 100, 10, num_running=4), step(3, 1, 0, 20, num_running=8, num_rejected=2)]
    figure = timeline(steps)
    batch_axes, queue_axes, kv_axes = figure.axes
    # Two bins of 2 s.
    assert batch_axes.lines[0].get_ydata().tolist() == [10, 20, 20]
    assert set(heights(batch_axes.collections[0])) == {0, 100}
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


def test_a_timeline_with_records_shows_the_slack_and_how_late_the_most_urgent_was():
    """Draw a request due at 1 s and out at 1.5 s, whose next four tokens catch up.

    These tokens are due every 0.1 s and come every 0.05 s.
    """
    figure = timeline([step(0, 1, 10, 0), step(1, 1, 0, 1)], [finished(0, 1.5)], RULE)
    slack_axes = figure.axes[3]
    assert slack_axes.lines[0].get_ydata().tolist() == pytest.approx([0.0, -0.5, -0.5])
    late = slack_axes.collections[0]
    assert late.get_hatch()
    assert heights(late).min() == pytest.approx(-0.5)
    assert drawn(figure)


def test_slack_of_a_few_milliseconds_has_an_axis_that_can_be_read():
    """A symmetric logarithmic axis has ticks at 0.1 s and more, and at 0."""
    tight = replace(finished(0, 0.03), slo=SLO(0.02, 0.02))
    slack_axes = timeline([step(0, 0.03, 10, 0)], [tight], RULE).axes[3]
    low, high = slack_axes.get_ylim()
    assert -0.1 < low < high < 0.1
    assert sum(low < tick < high for tick in slack_axes.get_yticks()) >= 3


def test_a_timeline_of_steps_without_length_or_of_none():
    assert drawn(timeline([step(0, 0.5, 10, 0)]))
    with pytest.raises(ValueError, match="no steps"):
        timeline([])


def test_a_timeline_in_which_nothing_was_computed():
    assert drawn(timeline([step(i, 0, 0, 0, num_rejected=1) for i in range(3)]))
    assert drawn(timeline([step(0, 0, 0, 0, num_rejected=1)], [rejected(0)], RULE))


def test_replicas_over_time_where_no_time_passed():
    leases = {"scaled": [Lease(0, 1, 0.0, 0.0, until_s=0.0)]}
    assert drawn(replicas_over_time(leases, {"scaled": [rejected(0)]}))


def test_replicas_over_time_counts_those_that_start_and_drain():
    leases = [
        Lease(0, 1, 0.0, 0.0, until_s=12.0),
        Lease(1, 1, 1.0, 3.0, closed_s=4.0, until_s=8.5),
        Lease(1, 1, 10.0, 11.0, until_s=12.0),
    ]
    figure = replicas_over_time({"scaled": leases}, {"scaled": REPLAYS["good"]})
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [0.0, 1.0, 8.5, 10.0, 12.0]
    assert list(line.get_ydata()) == [1, 2, 1, 2, 2]
    assert drawn(figure)
    assert all(tick.is_integer() for tick in figure.axes[0].get_yticks()), "half a replica"


def test_the_frontier_joins_what_no_cheaper_fleet_exceeds():
    rows = [("1 x a", 1.0, 0.4), ("1 x b", 2.0, 0.3), ("2 x a", 2.0, 0.9), ("2 x b", 4.0, 0.9)]
    fleets = pd.DataFrame(rows, columns=["fleet", "price_per_hour", "attainment"])
    fleets = fleets.assign(low=fleets.attainment - 0.1, high=fleets.attainment + 0.1)
    figure = cost_frontier(fleets, 0.99)
    (axes,) = figure.axes
    steps = [list(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2]
    assert [1.0, 2.0] in steps
    assert {"1 x a", "2 x a", "99 %"} == {text.get_text() for text in axes.texts}
    assert drawn(figure)


@pytest.mark.parametrize(("worst", "best"), [(0.6, 1.0), (0.7, 1.0), (0.9, 0.995), (0.9, 0.99)])
def test_no_name_of_a_fleet_lies_on_the_line_of_the_target(worst: float, best: float):
    rows = [("1 x a", 1.0, worst), ("2 x a", 2.0, 0.985), ("3 x a", 3.0, best)]
    fleets = pd.DataFrame(rows, columns=["fleet", "price_per_hour", "attainment"])
    figure = cost_frontier(fleets.assign(low=fleets.attainment, high=fleets.attainment), 0.99)
    (axes,) = figure.axes
    assert drawn(figure)
    line_y = axes.transData.transform((0, 0.99))[1]
    for text in axes.texts:
        extent = text.get_window_extent()
        assert not extent.y0 <= line_y <= extent.y1, text.get_text()


def test_the_names_of_fleets_can_be_read_over_the_intervals_of_others():
    rows = [("1 x a", 1.0, 0.9), ("1 x b", 1.1, 0.8), ("9 x b", 9.9, 1.0)]
    fleets = pd.DataFrame(rows, columns=["fleet", "price_per_hour", "attainment"])
    figure = cost_frontier(fleets.assign(low=0.5, high=1.0), 0.99)
    (axes,) = figure.axes
    assert drawn(figure)
    texts = {text.get_text(): text for text in axes.texts}
    assert all(texts[name].get_path_effects() for name in ("1 x a", "9 x b")), "white around them"
    dearest_x = axes.transData.transform((9.9, 1.0))[0]
    marker_pixels = 4.5 / 2 / 72 * figure.dpi
    assert texts["99 %"].get_window_extent().x0 > dearest_x + marker_pixels


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


def test_the_fit_plot_tells_small_errors_apart():
    measured = np.array([0.01, 0.02, 0.04])
    figure = fit_plot(measured * [1.001, 0.999, 1.0], measured)
    drawn(figure)
    ticks = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert len(set(ticks)) == len(ticks)


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
