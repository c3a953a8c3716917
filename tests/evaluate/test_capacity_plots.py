"""Tests that the figures of a capacity search show its curves, its bands and its bounds."""

from __future__ import annotations

import pandas as pd
import pytest

from slosched.evaluate.plots import attainment_curves, goodput_curves

CURVE = pd.DataFrame(
    {
        "policy": ["edf", "edf", "fcfs", "fcfs"],
        "rate": [4.0, 2.0, 2.0, 4.0],
        "attainment": [0.5, 1.0, 0.9, 0.2],
        "attainment_low": [0.4, 0.9, 0.8, 0.1],
        "attainment_high": [0.6, 1.0, 1.0, 0.3],
        "good_requests_per_s": [2.0, 2.0, 1.8, 0.8],
        "good_low": [1.6, 1.8, 1.6, 0.4],
        "good_high": [2.4, 2.0, 2.0, 1.2],
    }
)


def lines(figure) -> dict[str, tuple[list[float], list[float]]]:
    """Return the data of each line by its name in the legend."""
    drawn = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in drawn}


def band(figure, i: int) -> set[tuple[float, float]]:
    return {tuple(point) for point in figure.axes[0].collections[i].get_paths()[0].vertices}


def test_goodput_curves_are_in_order_of_the_rate_beside_what_was_offered():
    figure = goodput_curves(CURVE)
    assert lines(figure) == {
        "offered": ([2, 4], [2, 4]),
        "edf": ([2, 4], [2, 2]),
        "fcfs": ([2, 4], [1.8, 0.8]),
    }
    assert {(2.0, 1.8), (4.0, 1.6), (4.0, 2.4)} <= band(figure, 0)
    assert figure.axes[0].get_ylim()[1] > 2.4


def test_each_bound_is_a_dashed_line_of_its_own():
    bounded = CURVE.assign(
        bound_requests_per_s=[3.0, 2.0, 2.0, 3.0], bound_name=["L2 on-time"] * 2 + ["L1 fluid"] * 2
    )
    figure = goodput_curves(bounded)
    assert lines(figure)["bound: L2 on-time"] == ([2, 4], [2, 3])
    assert lines(figure)["bound: L1 fluid"] == ([2, 4], [2, 3])
    dashes = {
        str(line._dash_pattern) for line in figure.axes[0].lines if "bound" in line.get_label()
    }
    assert len(dashes) == 2
    unbounded = CURVE.assign(bound_requests_per_s=float("nan"), bound_name=None)
    assert "bound" not in " ".join(lines(goodput_curves(unbounded)))


def test_attainment_curves_show_their_targets():
    figure = attainment_curves(CURVE, targets=(0.9, 0.99))
    assert lines(figure) == {"edf": ([2, 4], [1.0, 0.5]), "fcfs": ([2, 4], [0.9, 0.2])}
    assert [text.get_text() for text in figure.axes[0].texts] == ["90%", "99%"]
    assert {(2.0, 0.9), (4.0, 0.4), (4.0, 0.6)} <= band(figure, 0)


def test_a_single_point_is_drawn_and_what_is_no_curve_is_refused(tmp_path):
    goodput_curves(CURVE[:1]).savefig(tmp_path / "point.png", dpi=40)
    with pytest.raises(ValueError, match="column attainment_low"):
        attainment_curves(CURVE.drop(columns="attainment_low"))
    with pytest.raises(ValueError, match="at least one point"):
        goodput_curves(CURVE[:0])
