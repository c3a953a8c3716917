"""The table of all routers, by name."""

from __future__ import annotations

from slosched.fleet.router import Router
from slosched.fleet.routers.cheapest_in_time import CheapestInTime
from slosched.fleet.routers.least_requests import LeastRequests
from slosched.fleet.routers.least_tokens import LeastTokens
from slosched.fleet.routers.lmetric import LMetric
from slosched.fleet.routers.power_of_two import PowerOfTwo
from slosched.fleet.routers.predicted_ttft import PredictedTTFT
from slosched.fleet.routers.prefix_affine import PrefixAffine
from slosched.fleet.routers.round_robin import RoundRobin
from slosched.fleet.routers.slo_bins import SLOBins

ROUTERS: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "power_of_two": PowerOfTwo,
    "least_tokens": LeastTokens,
    "prefix_affine": PrefixAffine,
    "lmetric": LMetric,
    "predicted_ttft": PredictedTTFT,
    "slo_bins": SLOBins,
    "cheapest_in_time": CheapestInTime,
}
