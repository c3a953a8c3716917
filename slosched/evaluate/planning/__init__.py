"""The cheapest fleet that keeps a promise: what is offered, what is tried, and what it serves."""

from slosched.evaluate.planning.offers import Offer, Reach, priced, reach_of
from slosched.evaluate.planning.search import Counts, Search, Verdict
from slosched.evaluate.planning.trials import Judged, Trials

__all__ = [
    "Counts",
    "Judged",
    "Offer",
    "Reach",
    "Search",
    "Trials",
    "Verdict",
    "priced",
    "reach_of",
]
