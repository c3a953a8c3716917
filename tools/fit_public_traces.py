"""Fits the synthetic generators to the public traces.

    python -m tools.fit_public_traces ../shared/traces

It writes `slosched/workload/public_traces.json`.  Of each trace that file keeps only quantiles of
lengths and gaps, a few variances and the summary row.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from slosched.workload.readers import MADE_UP, read_trace
from slosched.workload.statistics import FloatArray, IntArray, dispersion_of_counts
from slosched.workload.trace import Trace

TABLES = Path(__file__).parents[1] / "slosched" / "workload" / "public_traces.json"

SOURCES = {
    "azure_conv": ("azure_conv_2023.csv", "Azure/AzurePublicDataset b469a113", "CC-BY-4.0"),
    "azure_code": ("azure_code_2023.csv", "Azure/AzurePublicDataset b469a113", "CC-BY-4.0"),
    "mooncake_conv": ("mooncake_conversation.jsonl", "kvcache-ai/Mooncake 3b5a5941", "Apache-2.0"),
    "servegen_r1": (
        "servegen_deepseek_r1_1h_5rps.csv",
        "sampled with alibaba/ServeGen f891d118, busiest hour scaled to 5/s, seed 0",
        "Apache-2.0",
    ),
    "sharegpt": ("sharegpt_8k_lengths.csv", "project-etalon/etalon d5f18de1", "Apache-2.0"),
}
_TAIL = (0.98, 0.99, 0.995, 0.999, 1.0)
_PROMPT_LEVELS = (0.0, 0.005, 0.01, 0.02, *(i / 20 for i in range(1, 20)), *_TAIL)
_FINE_TAIL = (*(round(0.9 + i / 200, 3) for i in range(20)), 0.9975, 0.999, 0.9995, 1.0)
"""Finer levels from 0.9 on, for prompts with an extreme tail.

Between coarse levels, straight lines to such a tail would change the mean.
"""
_MEAN_TOLERANCE = 0.03
_OUTPUT_LEVELS = (0.0, 0.02, 0.05, *(i / 10 for i in range(1, 10)), 0.95, 0.98, 0.99, 0.995, 1.0)
_GAP_LEVELS = (0.0, 0.01, 0.02, *(i / 20 for i in range(1, 20)), *_TAIL[:-1], 0.9995, 1.0)
_NUM_PROMPT_BINS = 10
_TAUS_S = (1.0, 5.0, 30.0, 200.0, 1000.0)
_WINDOWS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_HEAVY_CV = 2.0
"""CV above which gaps are kept as quantiles, since a lognormal rate cannot explain it."""


def fit(trace: Trace) -> dict[str, object]:
    """Return the tables of one trace, ready for JSON."""
    return {
        "rate": trace.rate,
        "arrivals": _arrivals(trace),
        "lengths": _lengths(trace.prompt_tokens, trace.output_tokens),
        "summary": trace.summary(),
    }


def _arrivals(trace: Trace) -> dict[str, object]:
    if trace.provenance.get("arrivals") == MADE_UP:  # `read_trace` drew a Poisson process
        return {"rate": trace.rate, "modulation": []}
    gaps = np.diff(trace.arrivals_s)
    heavy = gaps.std() > _HEAVY_CV * gaps.mean()
    return _gap_quantiles(gaps) if heavy else _modulation(trace.arrivals_s)


def _gap_quantiles(gaps: FloatArray) -> dict[str, object]:
    quantiles = np.quantile(gaps, _GAP_LEVELS)
    return {"levels": _GAP_LEVELS, "gaps_s": [round(float(q), 6) for q in quantiles]}


def _modulation(arrivals_s: FloatArray) -> dict[str, object]:
    """Fit variances (not negative) of processes of fixed `_TAUS_S` to the dispersion.

    A Poisson process whose rate r has the relative covariance v exp(-lag / tau) has, in windows of
    length w, an index of dispersion of 1 + e(w) with

        e(w) = 2 r v tau (1 - tau / w (1 - exp(-w / tau))).

    Counts within one trace of length T vary around the trace's own mean, so e(T) w / T of this is
    not seen.
    """
    span_s = float(arrivals_s[-1])
    rate = (len(arrivals_s) - 1) / span_s
    windows, taus = np.array(_WINDOWS_S)[:, None], np.array(_TAUS_S)[None, :]
    effect = _excess_dispersion(windows, taus, rate)
    effect -= _excess_dispersion(np.array([[span_s]]), taus, rate) * windows / span_s
    seen = _dispersion(arrivals_s)
    weights = 1 / seen  # relative error
    variances, _ = nnls(effect * weights[:, None], np.maximum(seen - 1, 0) * weights)
    pairs = zip(variances, _TAUS_S, strict=True)
    modulation = [(round(float(v), 4), tau_s) for v, tau_s in pairs if v > 5e-4]
    return {"rate": rate, "modulation": modulation}


def _excess_dispersion(windows_s: FloatArray, taus_s: FloatArray, rate: float) -> FloatArray:
    excess: FloatArray = (
        2 * rate * taus_s * (1 - taus_s / windows_s * (1 - np.exp(-windows_s / taus_s)))
    )
    return excess


def _dispersion(arrivals_s: FloatArray) -> FloatArray:
    return np.array([dispersion_of_counts(arrivals_s, window_s) for window_s in _WINDOWS_S])


def _lengths(prompts: IntArray, outputs: IntArray) -> dict[str, object]:
    levels = _PROMPT_LEVELS
    if abs(_mean_between(prompts, levels) / prompts.mean() - 1) > _MEAN_TOLERANCE:
        levels = (*(level for level in levels if level < _FINE_TAIL[0]), *_FINE_TAIL)
    by_prompt = np.argsort(prompts, kind="stable")
    bins = np.array_split(outputs[by_prompt], _NUM_PROMPT_BINS)
    return {
        "prompt_levels": levels,
        "prompt_quantiles": _whole_quantiles(prompts, levels),
        "output_levels": _OUTPUT_LEVELS,
        "output_quantiles": [_whole_quantiles(inside, _OUTPUT_LEVELS) for inside in bins],
    }


def _mean_between(lengths: IntArray, levels: tuple[float, ...]) -> float:
    """Return the mean of lengths that are drawn between their quantiles."""
    quantiles = np.array(_whole_quantiles(lengths, levels))
    return float(np.diff(levels) @ (quantiles[1:] + quantiles[:-1]) / 2)


def _whole_quantiles(lengths: IntArray, levels: tuple[float, ...]) -> list[int]:
    return [int(q) for q in np.quantile(lengths, levels, method="nearest")]


def main(folder: Path, target: Path) -> None:
    """Fit every trace of `SOURCES` found in `folder` and write the tables to `target`."""
    tables: dict[str, object] = {}
    for kind, (file_name, origin, licence) in SOURCES.items():
        trace = read_trace(folder / file_name)
        source = {
            "file": file_name,
            "origin": origin,
            "licence": licence,
            "sha256": trace.provenance["sha256"],
        }
        tables[kind] = {"source": source, **fit(trace)}
    text = json.dumps(tables, indent=1)
    target.write_text(_short_lists(text) + "\n", encoding="utf-8")


def _short_lists(text: str) -> str:
    """Put each innermost list of the JSON text on one line."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda m: " ".join(m[0].split()), text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), TABLES)
