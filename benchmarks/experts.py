"""Steps of mixtures of experts, composed from AIConfigurator's tables or from measured kernels.

The measured kernels are those of LLMServingSim's profile of Qwen3-30B-A3B on the RTX PRO 6000.  It
has the time of a layer's experts over the tokens of a step and the number of experts that they
touch, besides the same tables as of dense models.  How many experts are touched depends on the
router, which was not profiled.  So tokens are routed at random here, to experts of equal popularity
and to favourites.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd

from slosched.perfmodel import Measurement, Part, Profile
from slosched.perfmodel.aiconfigurator import Deployment, compose_profile
from slosched.perfmodel.columns import Array

NUM_EXPERTS, NUM_PER_TOKEN, NUM_LAYERS = 128, 8, 48
_MAX_ROUTED = 512
"""Tokens beyond which all experts are touched, with favourites nearly so."""


DEPLOYMENTS = (
    Deployment("h100_sxm", "Qwen/Qwen3-30B-A3B"),
    Deployment("h200_sxm", "Qwen/Qwen3-30B-A3B", "sglang"),
    Deployment("h100_sxm", "Qwen/Qwen3-235B-A22B", tensor_parallel=8),
    Deployment("h100_sxm", "openai/gpt-oss-20b"),
    Deployment("h100_sxm", "openai/gpt-oss-120b", tensor_parallel=2),
    Deployment("b200_sxm", "openai/gpt-oss-120b"),
)


@dataclass(frozen=True)
class Mixture:
    """One profile: GPUs that share the model, and heads and KV capacity of each."""

    name: str
    tensor_parallel: int
    num_query_heads: int
    num_kv_heads: int
    kv_capacity_tokens: int
    """Our estimate: 0.9 of the memory less the weights."""


MIXTURES = (
    Mixture("rtxpro6000/qwen3-30b-a3b", 1, 32, 4, 240_000),
    Mixture("rtxpro6000/qwen3-30b-a3b-tp2", 2, 16, 2, 1_000_000),
)
ROUTERS = {"routed evenly": None, "routed to favourites": 1.0}
"""Shape of the gamma distribution of the experts' popularity; None if all are equally popular."""
_FOLDER = "RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507/bf16"


def composed_mixtures() -> Iterator[tuple[str, Profile, Profile]]:
    """Yield the title, 160 steps to be fitted and 1,500 others of mixtures in AIConfigurator."""
    for deployment in DEPLOYMENTS:
        fitted, judged = (
            compose_profile(deployment, num_steps=num_steps, seed=seed)
            for num_steps, seed in ((160, 0), (1500, 1))
        )
        gpus = f"{deployment.tensor_parallel} x {deployment.system}"
        title = f"{deployment.model} on {gpus}, {deployment.backend}'s tables"
        yield title, _whole_steps(fitted), _whole_steps(judged)


def _whole_steps(profile: Profile) -> Profile:
    steps = tuple(m for m in profile.measurements if m.part is Part.STEP)
    return Profile(steps, profile.provenance)


def measured_mixtures(perf: Path, compose: ModuleType) -> Iterator[tuple[str, Profile]]:
    """Yield the title and the composed steps of each profile and router.

    `compose` is the script profiling/llmservingsim/compose.py, which composes dense models.
    """
    for mixture in MIXTURES:
        source = compose.Source(
            name=mixture.name,
            gpu="NVIDIA RTX PRO 6000 Blackwell Server Edition",
            model="Qwen/Qwen3-30B-A3B-Instruct-2507",
            tables=f"{_FOLDER}/tp{mixture.tensor_parallel}",
            num_layers=NUM_LAYERS,
            num_sms=188,
            num_query_heads=mixture.num_query_heads,
            num_kv_heads=mixture.num_kv_heads,
            kv_capacity_tokens=mixture.kv_capacity_tokens,
        )
        dense = compose.compose(source, perf)
        # The profiler measured the experts of one GPU only; two GPUs have them whole, too.
        times = pd.read_csv(perf / _FOLDER / "tp1" / "moe.csv")
        for router, evenness in ROUTERS.items():
            sizes = np.unique([_tokens(m) for m in dense.measurements if m.part is Part.STEP])
            seconds = dict(
                zip(sizes.tolist(), _experts_seconds(times, sizes, evenness), strict=True)
            )
            steps = tuple(
                replace(m, seconds=m.seconds + float(seconds[_tokens(m)]))
                for m in dense.measurements
                if m.part is Part.STEP
            )
            facts = {
                **dense.provenance,
                "num_experts": str(NUM_EXPERTS),
                "num_experts_per_token": str(NUM_PER_TOKEN),
            }
            yield f"{mixture.name}, {router}", Profile(steps, facts)


def _experts_seconds(times: pd.DataFrame, sizes: Array, evenness: float | None) -> Array:
    """Return the seconds of the experts of all layers in steps of these numbers of tokens.

    The measured times are interpolated over the logarithm of the tokens and over the experts that
    are touched.
    """
    from scipy.interpolate import RegularGridInterpolator  # slow to import, only for this

    table = times.pivot(index="tokens", columns="activated_experts", values="time_us")
    # Few tokens cannot touch many experts; such cells take the time of the next larger step.
    table = table.bfill()
    layer_us = RegularGridInterpolator(
        (np.log2(table.index), table.columns.to_numpy(float)), table.to_numpy()
    )
    rng = np.random.default_rng(0)
    popularity = (
        np.ones((NUM_LAYERS, NUM_EXPERTS))
        if evenness is None
        else rng.gamma(evenness, size=(NUM_LAYERS, NUM_EXPERTS))
    )
    most = table.index.max()
    return np.array(
        [
            sum(
                layer_us((np.log2(min(n, most)), _touched(n, layer, rng))).item() / 1e6
                for layer in popularity
            )
            for n in sizes.tolist()
        ]
    )


def _touched(num_tokens: int, popularity: Array, rng: np.random.Generator) -> float:
    """Route every token to distinct experts at random, and return how many are touched."""
    num_routed = min(num_tokens, _MAX_ROUTED)
    # The largest keys of log(popularity) + Gumbel noise are a draw without replacement.
    keys = np.log(popularity) + rng.gumbel(size=(num_routed, NUM_EXPERTS))
    chosen = np.argpartition(-keys, NUM_PER_TOKEN, axis=1)[:, :NUM_PER_TOKEN]
    return float(len(np.unique(chosen)))


def _tokens(measurement: Measurement) -> int:
    return sum(new for new, _ in measurement.chunks)
