"""How many drafts `goodput` verifies, and what they gain: `python -m benchmarks.draft_choice`.

Simulated: Llama-3.1-8B on an H100 as AIConfigurator composes it, without noise.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

from slosched.cli.trace_source import make_up
from slosched.core import SLO, BatchShape, DraftOffer, Policy, Request
from slosched.metrics import RequestRecord, summarize
from slosched.perfmodel import load_model
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.drafts import drafts_that_pay
from slosched.simulator.drafts import SimulatedDrafts
from slosched.simulator.simulate import SimulationConfig, simulate

MODEL = "h100/llama-3.1-8b"
ACCEPTANCES = (0.3, 0.5, 0.7)
MOST = 4
KINDS = ((1000, 0.7), (200, 0.7), (200, 0.4))
"""Context lengths, each with an acceptance."""
BATCHES = (1, 4, 16, 32, 64, 128, 256, 512)
RATES = (20.0, 30.0, 45.0)
NUM_REQUESTS = 400


@dataclass
class FixedDrafts(Goodput):
    """`goodput` that verifies all drafts that are offered, as other policies do."""

    choose_drafts = Policy.choose_drafts


def chosen() -> None:
    """Print what is chosen for each of the decodes of a step that computes nothing else."""
    say("| decodes | " + " | ".join(f"context {c}, acceptance {a}" for c, a in KINDS) + " |")
    say("|---" * (1 + len(KINDS)) + "|")
    for num in BATCHES:
        cells = [_chosen(num, context, acceptance) for context, acceptance in KINDS]
        say(f"| {num} | " + " | ".join(cells) + " |")


def _chosen(num: int, context: int, acceptance: float) -> str:
    """Return the drafts for each decode, and by how much they multiply the tokens per second."""
    predict = load_model(MODEL).predict
    offers = [DraftOffer(Request(f"r{i}", 0.0, 1, 9), MOST, acceptance) for i in range(num)]
    shape = BatchShape()
    shape.add_decodes([context] * num)
    counts = drafts_that_pay(offers, shape, predict)
    gained = sum(acceptance ** (i + 1) for count in counts for i in range(count))
    longer = shape.copy()
    longer.lengthen_decodes(sum(counts))
    gain = (num + gained) / num * predict(shape) / predict(longer)
    return f"{sum(counts) / num:.2g} (x{gain:.2f})"


def served(acceptance: float) -> None:
    """Print good requests per second without drafts, with a fixed number, and with the choice."""
    model = load_model(MODEL)
    slo = SLO(ttft_s=1.0, tpot_s=0.03)
    plain = SimulationConfig()
    drafts = replace(plain, drafts=SimulatedDrafts(MOST, acceptance))
    cases = ((Goodput, plain), (FixedDrafts, drafts), (Goodput, drafts))
    for rate in RATES:
        trace = make_up("azure_conv", NUM_REQUESTS, None, rate, None, 1).with_slo(slo)
        cells = []
        for policy, config in cases:
            requests = simulate(trace, policy(), model, config)
            records = [RequestRecord.from_request(request) for request in requests]
            summary = summarize(records, config.limits.deadline_rule)
            tpots_s = [record.tpot_s for record in records if record.tpot_s]
            mean_ms = 1e3 * sum(tpots_s) / len(tpots_s)
            cells.append(f"{summary.good_requests_per_s:.1f} ({mean_ms:.1f} ms)")
        say(f"| {acceptance} | {rate:g} | " + " | ".join(cells) + " |")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()  # for --help
    chosen()
    say("\n| acceptance | requests/s | no drafts | 4 drafts | as many as pay |")
    say("|---|---|---|---|---|")
    for share in ACCEPTANCES:
        served(share)
