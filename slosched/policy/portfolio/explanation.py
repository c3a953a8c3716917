"""An evaluation in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator

from slosched.policy.portfolio.evaluation import Evaluation, Reason


def explained(evaluation: Evaluation) -> Iterator[str]:
    """Yield sentences on what a portfolio believed, what it chose, and why."""
    e = evaluation
    yield (
        f"At {e.asked_s:.1f} s, {e.in_trouble:.1%} of the latest requests were rejected, late or "
        "overdue though their promise could be kept. "
        f"So the last {e.num_requests} were replayed: {e.requests_per_s:.2g} a second, prompts of "
        f"{e.mean_prompt_tokens:.0f} tokens and outputs of {e.mean_output_tokens:.0f} in the mean."
    )
    if e.has_turned:
        yield (
            f"The traffic had turned: only the last {e.num_judged} requests were judged, and "
            "former scores were forgotten."
        )
    ranked = sorted(e.scores.items(), key=lambda item: -item[1].share)
    if ranked:
        shares = (
            f"{name} {score.share:.1%} ({score.low:.1%} to {min(1.0, score.high):.1%})"
            for name, score in ranked
        )
        yield f"Good requests under each candidate: {'; '.join(shares)}."
    if e.eliminated:
        yield (
            "Not replayed, as they had surely gained too little or two others were in question: "
            f"{', '.join(e.eliminated)}."
        )
    for name, why in e.failed.items():
        yield f"{name} could not be replayed: {why}."
    yield _chosen(e)


def _chosen(e: Evaluation) -> str:
    if e.reason is Reason.TOO_FEW:
        return f"{e.before} went on: {e.num_judged} requests are too few to judge by."
    if e.reason is Reason.NO_ANSWER:
        return f"{e.before} went on: there was no answer."
    if e.reason is Reason.BEST:
        return f"{e.before} went on: no other candidate was ahead."
    if e.reason is Reason.UNSURE:
        name, score = max(e.scores.items(), key=lambda item: item[1].lead)
        return (
            f"{e.before} went on: {name} was ahead by {_points(score.lead)}, but that may be "
            f"chance, a single burst or too little (at least {_points(score.lead_low)})."
        )
    score = e.scores[e.chosen]
    return (
        f"From {e.counted_s:.1f} s on {e.chosen} planned in place of {e.before}: it was ahead by "
        f"{_points(score.lead)}, surely by {_points(score.lead_low)}."
    )


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"
