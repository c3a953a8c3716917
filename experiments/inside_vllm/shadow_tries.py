"""How near `slosched shadow report` comes to what a policy then gains, in virtual time.

Each try plays the same requests twice to vLLM's engine core on an emulated device: in shadow mode,
where vLLM decides, and after the switch to the policy, with the latency model that was fitted to
the steps of the first run.  All other settings stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.inside_vllm.heats import Row
from experiments.inside_vllm.setups import RULE, Setup, System
from experiments.inside_vllm.virtual_setups import VIRTUAL_SETUPS
from slosched.metrics import RequestRecord, summarize
from slosched.workload import Trace

_CONVERSATIONS = replace(VIRTUAL_SETUPS["conv-h100"], num_requests=600)
_CODE = replace(VIRTUAL_SETUPS["code-h100"], num_requests=300)
_MOONCAKE = VIRTUAL_SETUPS["mooncake-h100"]


@dataclass(frozen=True)
class Try:
    """One device under one traffic, and the policy to which it is switched."""

    setup: Setup
    rate: float
    policy: str = "goodput"
    budget: int = 2048
    """`--max-num-batched-tokens`, before and after the switch."""

    @property
    def name(self) -> str:
        return f"{self.setup.name} on {self.setup.latency_model}"

    @property
    def trace(self) -> Trace:
        return self.setup.load(self.rate, 0)


def _on(latency_model: str, tpot_s: float) -> Setup:
    return replace(_CONVERSATIONS, latency_model=latency_model, tpot_s=tpot_s)


TRIES = (
    *(Try(_CONVERSATIONS, rate) for rate in (20.0, 28.0, 40.0)),
    Try(_CONVERSATIONS, 28.0, "goodput+door"),
    Try(_CONVERSATIONS, 28.0, "edf:drop=expired"),
    *(Try(_CODE, rate, budget=1024) for rate in (4.5, 9.0)),
    Try(_on("a100/llama-3.1-8b", 0.05), 20.0),
    Try(_on("l40s/llama-3.1-8b", 0.05), 8.0),
    Try(_MOONCAKE, 2.5),
)


def rows(tries: tuple[Try, ...] = TRIES) -> Iterator[Row]:
    """Play the tries, each run in a process of its own, and yield their rows."""
    from experiments.inside_vllm.virtual_time import workers

    with workers(1, tries[0].setup) as pool:
        for each in tries:
            with TemporaryDirectory() as folder:
                settings = {"policy": each.policy}
                recorded = pool.apply(_play, (each, {**settings, "shadow": folder}))
                [run] = Path(folder).iterdir()
                said, model = pool.apply(_said, (run,))
                live = pool.apply(_play, (each, {**settings, "profile": model}))
            yield {
                "try": each.name,
                "rate": each.rate,
                "policy": each.policy,
                "num_requests": len(each.trace),
                "recorded": recorded,
                **said,
                "live": live,
            }


def line(row: Row) -> str:
    """Return a row of a table in Markdown: shares in time, then the gain that was said and got."""
    shares = [100 * float(str(row[name])) for name in ("recorded", "replayed", "said", "live")]
    recorded, replayed, said, live = shares
    cells = " | ".join(f"{each:.1f}" for each in (*shares, said - replayed, live - recorded))
    return f"| {row['try']}, {row['rate']:g}/s | `{row['policy']}` | {cells} |"


def _said(run: Path) -> tuple[dict[str, float], str]:
    """Return what the report says of a recorded run, and the file with its latency model."""
    from slosched.evaluate.shadow import judge
    from slosched.perfmodel import save_model
    from slosched.replay.shadow import read_shadow

    judged = judge(read_shadow(run))
    model = run / "model.json"
    save_model(judged.model.model, model)
    said = {"replayed": judged.theirs.attainment, "said": judged.ours.attainment}
    return said, str(model)


def _play(each: Try, settings: dict[str, str]) -> float:
    """Play the requests in this process, which has imported vLLM; return the share in time."""
    from slosched.engine.torch.embedded import embedded_model_dir
    from slosched.integrations.vllm.in_process import emulated_core, play
    from slosched.integrations.vllm.warp import warped

    options = each.setup.engine_options(System(each.budget, each.policy))
    emulated = {"emulate": each.setup.latency_model, **settings}
    with warped():
        core = emulated_core(embedded_model_dir(), options, emulated)
        records: list[RequestRecord] = play(core, each.trace)
    return summarize(records, RULE).attainment
