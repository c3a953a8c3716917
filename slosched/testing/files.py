"""Scenarios as JSON, so that one on which a law broke can be kept and played again."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from slosched.core import SLO, DeadlineRule, Limits, PreemptionMode
from slosched.kv import Eviction, HostWrites, PrefixCaching, PrefixHost
from slosched.simulator.disturbances import Disturbances
from slosched.testing.scenario import Scenario, ScenarioRequest


def scenario_to_json(scenario: Scenario) -> str:
    """Return a text from which `scenario_from_json` makes an equal scenario."""
    return json.dumps(asdict(scenario), indent=1)


def scenario_from_json(text: str) -> Scenario:
    """Return the scenario that `scenario_to_json` wrote."""
    fields = json.loads(text)
    host = fields["prefix_host"]
    return Scenario(
        **{
            **fields,
            "requests": tuple(map(_request, fields["requests"])),
            "limits": _limits(fields["limits"]),
            "disturbances": _disturbances(fields["disturbances"]),
            "prefix_cache": PrefixCaching(fields["prefix_cache"]),
            "eviction": Eviction(fields.get("eviction", Eviction.LRU)),
            "prefix_host": PrefixHost(host["num_blocks"], HostWrites(host["writes"])),
        }
    )


def _request(fields: dict[str, Any]) -> ScenarioRequest:
    hashes = tuple(fields["prefix_hashes"])
    return ScenarioRequest(**{**fields, "slo": SLO(**fields["slo"]), "prefix_hashes": hashes})


def _disturbances(fields: dict[str, Any]) -> Disturbances:
    slowness = tuple((time_s, factor) for time_s, factor in fields.get("slowness", ()))
    return Disturbances(**{**fields, "slowness": slowness})


def _limits(fields: dict[str, Any]) -> Limits:
    mode, rule = PreemptionMode(fields["preemption_mode"]), DeadlineRule(fields["deadline_rule"])
    return Limits(**{**fields, "preemption_mode": mode, "deadline_rule": rule})
