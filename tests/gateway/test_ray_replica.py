"""A replica of a Ray Serve application, and the server that it runs."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: pip install 'slosched[ray]'")

from slosched.gateway.ray_serve.replica import EngineReplica
from slosched.gateway.ray_serve.server_process import ServerProcessError


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_only_a_server_that_ends_by_itself_is_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve would start another one while the others drain."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    replica = EngineReplica(["--emulate", "l40s/llama-3.1-8b"], {}, 0.0)
    replica.check_health()
    asyncio.run(replica.stop())
    replica.check_health()
    replica._is_stopping = False
    with pytest.raises(ServerProcessError, match="ended with status 0"):
        replica.check_health()
