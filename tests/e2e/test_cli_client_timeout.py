"""`--client-timeout`: clients that disconnect, simulated and against a server."""

from __future__ import annotations

import json
import queue
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import Said
from live_server import Device, live

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
OVERLOAD = ("--trace", "azure_conv", "--rate", "30", "-n", "80")


def provenance(file: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(file.read_text())["otherData"]
    return found


def test_simulated_clients_leave_and_are_misses(cli: Cli, tmp_path: Path) -> None:
    waited = cli("replay", "-p", "fcfs", *OVERLOAD, "--perfetto", "waited.json")
    assert waited.status == 0, waited.err
    assert "aborted" not in waited.out
    assert "100.0%" in waited.out
    left = cli("replay", "-p", "fcfs", *OVERLOAD, "--client-timeout", "12s", "--perfetto", "a.json")
    assert left.status == 0, left.err
    (num_left,) = re.findall(r"^aborted: (\d+) client$", left.out, flags=re.MULTILINE)
    assert 0 < int(num_left) < 80
    assert f"{100 * (1 - int(num_left) / 80):.1f}%" in left.out, "nothing else was promised"
    assert provenance(tmp_path / "a.json")["client_timeout_s"] == 12.0


class WarmUp(queue.Queue[str]):
    """The requests that a device has served; after the third, which ends a warm-up, it stands."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def put(self, item: str, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        if self.qsize() == 3:
            self._device.gate.clear()


def test_clients_of_a_server_leave(cli: Cli) -> None:
    with live() as server:
        server.device.released = WarmUp(server.device)
        said = cli(
            *("replay", "--url", server.url, "--trace", "poisson", "-n", "4", "--rate", "50"),
            *("--max-prompt-tokens", "20", "--max-output-tokens", "4", "--client-timeout", "200ms"),
        )
        server.device.gate.set()
    assert said.status == 0, said.err
    assert "4 x no answer after 0.2 s, given up" in said.out
    assert "aborted: 4 client" in said.out


def test_a_timeout_without_a_meaning_is_refused(cli: Cli) -> None:
    said = cli("replay", "--client-timeout", "0s")
    assert said.status == 2
    assert "--client-timeout" in said.complaint
    assert "must be positive" in said.complaint
