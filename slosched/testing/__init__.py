"""The laws that every policy must obey, for tests of slosched and of your own policies.

    from slosched.testing import check_policy

    def test_my_policy_obeys_the_laws() -> None:
        check_policy(MyPolicy)

`check_policy` plays random scenarios on a simulated device. It raises LawBrokenError, or the
engine's own error, with the smallest failing scenario. It needs the package `hypothesis`.
`check_others_unharmed` checks one law more, for policies that go by SLOs.
"""

from slosched.testing.files import scenario_from_json, scenario_to_json
from slosched.testing.laws import check_laws, check_policy
from slosched.testing.plans import LawBrokenError
from slosched.testing.play import Run, play
from slosched.testing.random_scenarios import prefix_hosts, scenarios
from slosched.testing.scenario import Scenario, ScenarioRequest, device_model
from slosched.testing.unkeepable import Broken, check_others_unharmed

__all__ = [
    "Broken",
    "LawBrokenError",
    "Run",
    "Scenario",
    "ScenarioRequest",
    "check_laws",
    "check_others_unharmed",
    "check_policy",
    "device_model",
    "play",
    "prefix_hosts",
    "scenario_from_json",
    "scenario_to_json",
    "scenarios",
]
