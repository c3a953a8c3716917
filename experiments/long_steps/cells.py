"""The devices, requests and promises of the study."""

from __future__ import annotations

from experiments.portfolio.cells import CODE, CONVERSATIONS, Cell, Part

NUM_REQUESTS = 400
FIRST_WINDOW = 22
"""The first window that is played; nobody looked at it while the policy was made."""


def _cell(model: str, trace: str, promise: str, rate: float) -> Cell:
    what = "code" if trace == CODE else "conversations"
    name = f"{model}, {what}, {promise}, {rate:g}/s"
    return Cell(name, model, (Part(trace, rate, promise, NUM_REQUESTS),))


MIXTURES = (
    _cell("h100/qwen3-30b-a3b", CONVERSATIONS, "medium", 12.0),
    _cell("h100/qwen3-30b-a3b", CONVERSATIONS, "medium", 18.0),
    _cell("h200/qwen3-30b-a3b", CONVERSATIONS, "tight", 8.0),
    _cell("h200/qwen3-30b-a3b", CONVERSATIONS, "tight", 12.0),
    _cell("h200/qwen3-30b-a3b", CONVERSATIONS, "mixed", 11.0),
    _cell("h200/qwen3-30b-a3b", CODE, "tight", 5.0),
    _cell("l40s/gpt-oss-20b", CONVERSATIONS, "medium", 8.0),
    _cell("b200/gpt-oss-120b", CONVERSATIONS, "tight", 16.0),
    _cell("b200/gpt-oss-120b", CONVERSATIONS, "tight", 22.0),
    _cell("h200/deepseek-v3-tp8-ep8", CONVERSATIONS, "medium", 6.0),
)
"""Mixtures of experts: the first tokens of a chunk cost most of its time."""
DENSE = (
    _cell("l4/llama-3.2-3b", CONVERSATIONS, "medium", 2.5),
    _cell("l40s/llama-3.1-8b", CONVERSATIONS, "medium", 4.5),
    _cell("h100/llama-3.1-8b", CONVERSATIONS, "tight", 22.0),
    _cell("h100/llama-3.1-8b", CODE, "medium", 6.0),
    _cell("h100/llama-3.1-70b-tp4", CONVERSATIONS, "medium", 11.0),
    _cell("h200/qwen3-32b", CONVERSATIONS, "medium", 5.0),
)
"""Dense models, on which long steps should change little."""
CELLS = {cell.name: cell for cell in (*MIXTURES, *DENSE)}
POLICIES = {
    "goodput": "goodput",
    "without": "experiments.long_steps.without:WithoutLongSteps",
    "edf 512": "edf:token_budget=512,drop=infeasible",
    "edf 2,048": "edf:token_budget=2048,drop=expired",
    "slai": "slai:token_budget=2048,drop=expired",
    "slidebatching": "slidebatching:deadlines=run,drop=infeasible",
    "qoserve": "qoserve:drop=infeasible",
}
"""The policies by the name that the page gives them."""
OURS = ("goodput", "without")
