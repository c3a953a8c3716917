"""What a router reads from a request before it sends it on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slosched.core import SLO, OnInfeasible
from slosched.engine.server.errors import ApiError
from slosched.gateway.asked import Asked, Promised, read
from slosched.gateway.asked_promises import Tier

DEFAULT = SLO(ttft_s=1.0, tpot_s=0.1)
SILVER = SLO(ttft_s=5.0, tpot_s=0.2)


def promised_to(tier: Tier | None) -> Promised:
    """Return what replicas promise that have told about silver, and not yet about gold."""
    if tier is None:
        return Promised(DEFAULT, OnInfeasible.REJECT)
    if tier.name == "silver":
        return Promised(SILVER, OnInfeasible.REJECT)
    if tier.name == "late":
        return Promised(SILVER, OnInfeasible.SERVE)
    return Promised(DEFAULT, None)


def asked(
    headers: dict[str, str] | None = None, *, with_prefixes: bool = False, **body: Any
) -> Asked:
    content = json.dumps(body).encode()
    return read(content, headers or {}, promised_to, 4.0, with_prefixes=with_prefixes)


@pytest.mark.parametrize(
    ("body", "num_tokens"),
    [
        ({"prompt": "a" * 400}, 100),
        ({"prompt": [7] * 33}, 33),
        ({"prompt": ["a" * 40, "b" * 40]}, 20),
        ({"prompt": [[1, 2], [3]]}, 3),
        ({"messages": [{"role": "user", "content": "a" * 384}]}, 100),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 384}]}]}, 100),
        ({"input": "a" * 400}, 100),
        ({"instructions": "b" * 40, "input": "a" * 360}, 100),
        ({"input": [{"role": "user", "content": "a" * 384}]}, 100),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a" * 384}]}]},
            100,
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "a" * 384}]}, 100),
        ({"input": [{"type": "function_call_output", "output": "a" * 384}]}, 100),
        ({"input": 5, "instructions": 6}, 1),
        ({}, 1),
        ({"prompt": 5}, 1),
        ({"messages": ["odd", {"content": None}]}, 4),
    ],
)
def test_the_length_of_a_prompt(body: dict[str, Any], num_tokens: int) -> None:
    assert asked(**body).request.num_prompt_tokens == num_tokens


def test_the_slo_comes_from_the_body_the_headers_or_the_replicas() -> None:
    assert asked(prompt="a").request.slo == DEFAULT
    found = asked({"x-slo-ttft-ms": "300"}, prompt="a", slo_tpot_ms=20).request.slo
    assert found == SLO(ttft_s=0.3, tpot_s=0.02)
    to_vllm = {"slo_ttft_ms": 60_000, "other": "x"}
    found = asked({"x-slo-ttft-ms": "300"}, prompt="a", vllm_xargs=to_vllm).request.slo
    assert found == SLO(ttft_s=60.0, tpot_s=0.1), "else the router refuses what vLLM would serve"
    assert asked(prompt="a", vllm_xargs=None).request.slo == DEFAULT
    assert asked(prompt="a", service_tier="silver").request.slo == SILVER
    assert asked(prompt="a", service_tier="gold").request.slo == DEFAULT
    found = asked(prompt="a", slo_tpot_ms=20, vllm_xargs={"slo_tier": "silver"}).request.slo
    assert found == SLO(ttft_s=5.0, tpot_s=0.02)


@pytest.mark.parametrize(
    ("headers", "body", "named"),
    [
        ({}, {}, None),
        ({}, {"service_tier": "default"}, None),
        ({}, {"service_tier": "gold"}, ("service_tier", "gold")),
        ({"x-gateway-inference-objective": "gold"}, {}, ("service_tier", "gold")),
        ({}, {"vllm_xargs": {"slo_tier": "gold"}}, ("slo_tier", "gold")),
    ],
)
def test_a_tier_is_asked_about_as_the_request_names_it(
    headers: dict[str, str], body: dict[str, Any], named: tuple[str, str] | None
) -> None:
    asked_for: list[Tier | None] = []

    def note(tier: Tier | None) -> Promised:
        asked_for.append(tier)
        return promised_to(tier)

    read(json.dumps(body).encode(), headers, note, 4.0, with_prefixes=False)
    assert asked_for == [named]


@pytest.mark.parametrize(
    ("headers", "body", "may"),
    [
        ({}, {}, True),
        ({}, {"slo_best_effort": True}, False),
        ({}, {"on_infeasible": "serve"}, False),
        ({}, {"on_infeasible": "reject"}, True),
        ({}, {"service_tier": "gold"}, False),
        ({}, {"service_tier": "auto"}, True),
        ({}, {"service_tier": "silver"}, True),
        ({}, {"service_tier": "late"}, False),
        ({}, {"service_tier": "late", "on_infeasible": "reject"}, True),
        ({}, {"service_tier": ["silver"]}, False),
        ({"x-llm-d-inference-objective": "gold"}, {}, False),
        ({"x-llm-d-inference-objective": "silver"}, {}, True),
        ({}, {"vllm_xargs": {"slo_tier": "silver"}}, True),
        ({}, {"vllm_xargs": {"on_infeasible": "relegate"}}, False),
        ({}, {"vllm_xargs": {"slo_tier": "gold"}}, False),
        ({}, {"vllm_xargs": {"slo_tier": "default"}}, True),
    ],
)
def test_only_who_wants_no_late_answer_is_refused(
    headers: dict[str, str], body: dict[str, Any], *, may: bool
) -> None:
    assert asked(headers, prompt="a", **body).may_be_refused is may


@pytest.mark.parametrize(
    ("body", "may"),
    [
        (b"{}", False),
        (b'{"on_infeasible": null}', False),
        (b'{"on_infeasible": "reject"}', True),
        (b'{"on_infeasible": "relegate"}', False),
    ],
)
def test_who_does_not_say_is_refused_only_if_the_replicas_would(body: bytes, *, may: bool) -> None:
    promised = Promised(DEFAULT, OnInfeasible.SERVE)
    found = read(body, {}, lambda _tier: promised, 4.0, with_prefixes=False)
    assert found.may_be_refused is may


def test_prompts_share_hashes_as_far_as_they_share_text() -> None:
    one = asked(prompt="a" * 256, with_prefixes=True).request
    other = asked(prompt="a" * 128 + "b" * 128, with_prefixes=True).request
    assert len(one.prefix_hashes) == len(other.prefix_hashes) == 4
    assert one.prefix_hashes[:2] == other.prefix_hashes[:2]
    assert not set(one.prefix_hashes[2:]) & set(other.prefix_hashes[2:])
    assert one.prefix_block_tokens == 16
    assert asked(prompt=[1] * 40, with_prefixes=True).request.prefix_block_tokens == 16
    assert asked(prompt="a" * 256).request.prefix_hashes == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"slo_ttft_ms": "x"}', "slo_ttft_ms"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_what_cannot_be_read_is_a_400(content: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as error:
        read(content, {}, promised_to, 4.0, with_prefixes=False)
    assert error.value.status == 400
