"""The latency model that `serve` measures by itself and keeps for the next start."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from slosched.cli.console import console
from slosched.cli.local_model import LocalModel
from slosched.cli.profile_run import MIN_ROWS, ProfileRun, run_profile
from slosched.core import Limits
from slosched.perfmodel import FittedModel, fit, load_model, save_model
from slosched.perfmodel.store import MODEL_FORMAT, ModelFileError

_QUICK_BATCHES = 60
_QUICK_CONTEXT_TOKENS = 2048
_POOR_PERCENT = 15.0
"""A quiet CPU is fitted to within 7 %, a GPU to within 3 % (`slosched profile --list`)."""


def calibrated_model(
    local: LocalModel, limits: Limits, calibrate_s: float, *, anew: bool
) -> FittedModel:
    """Return the latency model of this model on this device, and print its error.

    It comes from the cache. If the cache has none that can be read, or if `anew` is true, the model
    is profiled now.
    """
    from slosched.engine.torch import default_cache_dir

    path = default_cache_dir() / "latency" / f"{_fingerprint(local, limits)}.json"
    kept = None if anew else _kept_model(path)
    model = kept or _measured_model(local, limits, calibrate_s, path)
    date = model.provenance.get("date", "before")
    how = "measured now" if kept is None else f"measured {date}, --recalibrate does so anew"
    console.print(f"latency model: {_wrong_by(model)} ({how}; {path})", markup=False)
    if model.held_out_error.get("mape", 0.0) > _POOR_PERCENT:
        _warn_of_poor(model, calibrate_s)
    return model


def _kept_model(path: Path) -> FittedModel | None:
    """Return the model of an earlier start; None if there is none, or half of one."""
    if not path.exists():
        return None
    try:
        return load_model(path)
    except ModelFileError as error:
        console.print(f"the latency model that was kept is of no use: {error}", markup=False)
        return None


def _measured_model(
    local: LocalModel, limits: Limits, calibrate_s: float, path: Path
) -> FittedModel:
    console.print(
        f"no --latency-model given: profiling {local.loaded.name} for "
        f"at most {calibrate_s:g} s, or for {MIN_ROWS} steps if they take longer "
        f"(kept in {path.parent})"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    run = ProfileRun(
        num_batches=_QUICK_BATCHES,
        time_limit_s=calibrate_s,
        max_context_tokens=_QUICK_CONTEXT_TOKENS,
        overwrite=True,
    )
    model = fit(run_profile(local, limits, path.with_suffix(".csv"), run)).model
    save_model(model, path)
    return model


def _wrong_by(model: FittedModel) -> str:
    error = model.held_out_error
    if not {"mape", "p99"} <= error.keys():
        return "how wrong it is was not kept"
    return f"wrong by {error['mape']:.1f} % on average and {error['p99']:.1f} % at p99"


def _warn_of_poor(model: FittedModel, calibrate_s: float) -> None:
    console.print(
        f"[bold yellow]warning:[/] the latency model is wrong by {model.held_out_error['mape']:.0f}"
        f" % on average, more than {_POOR_PERCENT:g} %: promises that could be kept are refused, "
        "and others are broken.  Measure it anew while the machine is quiet "
        f"(--recalibrate --calibrate {max(60.0, 2 * calibrate_s):g}s), or at length "
        "(docs/how-to/profile-and-fit.md)."
    )


def _fingerprint(local: LocalModel, limits: Limits) -> str:
    """Return a file name with a hash of everything that step times depend on.

    When any of it changes, so does the name, and a stale latency model is never loaded.
    """
    facts = {k: v for k, v in local.provenance().items() if k not in ("date", "kv_capacity_tokens")}
    facts |= {
        "format": MODEL_FORMAT,
        "tokens": str(limits.max_num_batched_tokens),
        "seqs": str(limits.max_num_seqs),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return f"{Path(local.loaded.name).name}-{digest}"
