"""What /metrics shows, and when."""

from __future__ import annotations

import re

import pytest
from changeable import changing_over
from factories import make_model, make_request, make_scheduler
from live_server import Live, live
from test_server_faults import raw_request

from slosched.core import SLO, BatchShape, SchedulerOutput, SchedulerView
from slosched.engine.server.metrics import ServerMetrics
from slosched.perfmodel import OnlineModel
from slosched.policy import FCFS, Door
from slosched.workload.service_tier import ServiceTier

POLICIES = ("fcfs", "edf")


def samples(page: str) -> dict[str, float]:
    lines = [line for line in page.splitlines() if line.startswith("slosched:")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_bias_margin_and_misses_of_a_model_that_learns() -> None:
    model = OnlineModel(make_model())
    decode, prefill = BatchShape(), BatchShape()
    decode.add(1, 100)
    prefill.add(100, 0)
    for _ in range(50):
        model.observe(decode, 1.2 * model.base.predict(decode))
    model.observe(prefill, 50 * model.base.predict(prefill))
    page = ServerMetrics(make_scheduler(model=model)).render("m")
    found = samples(page)

    def of(name: str, regime: str) -> float:
        return found[f'slosched:{name}{{model_name="m",regime="{regime}"}}']

    assert of("latency_model_bias", "decode") == pytest.approx(1.2, rel=0.02)
    assert of("latency_model_margin", "decode") > 1
    assert of("steps_observed_total", "decode") == 50
    assert of("steps_observed_total", "prefill") == of("steps_over_upper_total", "prefill") == 1
    assert page.count("# TYPE slosched:latency_model_bias gauge") == 1


def test_nothing_of_a_model_that_does_not_learn() -> None:
    page = ServerMetrics(make_scheduler(model=make_model())).render("m")
    assert "latency_model_bias" not in page


def test_a_portfolio_says_who_plans_and_what_it_found() -> None:
    portfolio = changing_over("fcfs", "edf")
    scheduler = make_scheduler(portfolio)
    metrics = ServerMetrics(scheduler)
    before = samples(metrics.render("m"))
    assert before['slosched:portfolio_plans{model_name="m",policy="fcfs"}'] == 1
    assert before['slosched:portfolio_evaluations_total{model_name="m"}'] == 0
    scheduler.add_request(make_request(ttft_s=0.05))
    for i in range(20):
        portfolio.schedule(scheduler.view(i / 100))
    after = samples(metrics.render("m"))
    changes = after['slosched:portfolio_changes_total{model_name="m"}']
    assert changes == portfolio.num_changes > 0
    plans = {p: after[f'slosched:portfolio_plans{{model_name="m",policy="{p}"}}'] for p in POLICIES}
    assert plans == {p: float(p == portfolio.current) for p in POLICIES}
    shares = [after[f'slosched:portfolio_share{{model_name="m",policy="{p}"}}'] for p in POLICIES]
    assert sorted(shares) == [0, 1]


def test_nothing_of_a_portfolio_where_there_is_none() -> None:
    assert "portfolio" not in ServerMetrics(make_scheduler()).render("m")


def number(server: Live, name: str, labels: str = "") -> float:
    """Return the sum of all samples of a metric that have these labels."""
    page = server.get("/metrics")[1]
    found = re.findall(rf"^{name}{{[^}}]*{labels}[^}}]*}} (\S+)$", page, re.MULTILINE)
    assert found, name
    return sum(map(float, found))


def test_tokens_and_latencies_count_when_they_happen() -> None:
    """A stream that is still running has had its first tokens, and a prompt."""
    with live(max_model_len=1024) as server:
        body = {"prompt": "abcd", "max_tokens": 900, "stream": True}
        with raw_request(server, body) as client:
            received = b""
            while received.count(b"data: ") < 5:
                received += client.recv(4096)
            server.device.gate.clear()
            assert number(server, "vllm:num_requests_running") == 1
            assert number(server, "vllm:prompt_tokens_total") == 4
            assert number(server, "vllm:generation_tokens_total") >= 4
            assert number(server, "vllm:time_to_first_token_seconds_count") == 1
            assert number(server, "vllm:inter_token_latency_seconds_count") >= 3
            assert number(server, "vllm:e2e_request_latency_seconds_count") == 0
            server.device.gate.set()
        server.device.released.get(timeout=10)
        server.post(prompt="xy", max_tokens=3)
        assert number(server, "vllm:prompt_tokens_total") == 6
        assert number(server, "vllm:time_to_first_token_seconds_count") == 2
        assert number(server, "vllm:request_success_total", 'finished_reason="abort"') == 1
        assert number(server, "vllm:request_success_total", 'finished_reason="length"') == 1


VLLM_HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_num_preemptions",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "iteration_tokens_total",
]


def test_every_metric_of_vllm_that_an_engine_has_is_filled() -> None:
    with live() as server:
        server.post(prompt="abcde", max_tokens=7)
        for name in VLLM_HISTOGRAMS:
            assert number(server, f"vllm:{name}_count") >= 1, name
        for name, total in (
            ("request_prompt_tokens", 5),
            ("request_generation_tokens", 7),
            ("request_params_max_tokens", 7),
            ("iteration_tokens_total", 5 + 6),
        ):
            assert number(server, f"vllm:{name}_sum") == total, name
        inference_s = number(server, "vllm:request_inference_time_seconds_sum")
        parts = [number(server, f"vllm:request_{part}_time_seconds_sum") for part in PARTS]
        assert sum(parts) == pytest.approx(inference_s)
        assert number(server, "vllm:cache_config_info", 'block_size="4"') == 1
        assert number(server, "vllm:corrupted_requests_total") == 0
        assert number(server, "vllm:num_requests_waiting_by_reason", 'reason="capacity"') == 0
        computed = number(server, "vllm:prompt_tokens_by_source_total", 'source="local_compute"')
        assert (computed, number(server, "vllm:prompt_tokens_by_source_total")) == (5, 5)
        assert number(server, "vllm:admission_rejections_total", 'reason="overload"') == 0


PARTS = ("prefill", "decode")


def test_http_requests_and_the_process() -> None:
    with live() as server:
        server.post(prompt="x", max_tokens=1)
        server.post(prompt="x", n=0)
        server.get("/nowhere")
        for model in ("a/b", "models", "v1", "m", ""):
            server.get(f"/v1/models/{model}")

        def answers(handler: str, method: str, status: str) -> float:
            labels = f'handler="{handler}",method="{method}",status="{status}"'
            return number(server, "http_requests_total", labels)

        assert answers("/v1/completions", "POST", "2xx") == 1
        assert answers("/v1/completions", "POST", "4xx") == 1
        assert answers("none", "GET", "4xx") == 1
        assert answers("/v1/models/.id.", "GET", "4xx") == 5
        labels = 'handler="/v1/completions",method="POST"'
        assert number(server, "http_request_duration_seconds_count", labels) == 2
        page = server.get("/metrics")[1]
        assert page.count("# TYPE http_request_duration_seconds histogram") == 1
        for name in ("cpu_seconds_total", "start_time_seconds", "max_fds"):
            [value] = re.findall(rf"^process_{name} (\S+)$", page, re.MULTILINE)
            assert float(value) > 0


FAST_SLO = SLO(ttft_s=20.0, tpot_s=5.0)
GOLD = ServiceTier("gold", SLO(ttft_s=10.0, tpot_s=5.0))


@pytest.mark.parametrize("overlap", [False, True])
def test_expected_ttft_its_error_and_slack_by_tier(overlap: bool) -> None:
    """The expected TTFT plus its error is the actual one; slack is what is left of the promise."""
    door = Door(FCFS())
    with live(door, default_slo=FAST_SLO, tiers=(GOLD,), overlap=overlap) as server:
        for _ in range(2):
            server.post(prompt="abc", max_tokens=2, service_tier="gold")
        server.post(prompt="abc", max_tokens=2)
        gold = 'tier="gold"'
        for name in ("ttft_expected", "ttft_error", "slack_when_scheduled"):
            assert number(server, f"slosched:{name}_seconds_count", gold) == 2, name
            assert number(server, f"slosched:{name}_seconds_count") == 3, name
        expected_s, error_s, slack_s = (
            number(server, f"slosched:{name}_seconds_sum")
            for name in ("ttft_expected", "ttft_error", "slack_when_scheduled")
        )
        actual_s = number(server, "vllm:time_to_first_token_seconds_sum")
        queued_s = number(server, "vllm:request_queue_time_seconds_sum")
        assert expected_s > 0
        assert expected_s + error_s == pytest.approx(actual_s)
        assert slack_s == pytest.approx(10 + 10 + 20 - queued_s)
        page = server.get("/metrics")[1]
        assert page.count("# TYPE slosched:ttft_error_seconds histogram") == 1
        assert 'slosched:ttft_error_seconds_bucket{model_name="echo",le="-120"} 0' in page


def test_a_request_that_ends_without_a_token_has_no_error_of_its_ttft() -> None:
    with live(Door(FCFS()), default_slo=FAST_SLO) as server:
        server.device.fault = RuntimeError("lost")
        assert server.post(prompt="abc", max_tokens=1)[0] == 500
        assert "ttft_error" not in server.get("/metrics")[1]
        server.device.fault = None
        server.post(prompt="abc", max_tokens=1)
        assert number(server, "slosched:ttft_error_seconds_count") == 1


class SteppedClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


class SlowToDecide(FCFS):
    """A policy that takes 3 ms to plan a step, on a clock that only it moves."""

    clock = SteppedClock()

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        self.clock.time_s += 0.003
        return super().schedule(view)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_time_of_decisions(overlap: bool) -> None:
    with live(SlowToDecide(), clock=SlowToDecide.clock, overlap=overlap) as server:
        server.post(prompt="abc", max_tokens=4)
        num_steps = number(server, "slosched:schedule_seconds_count")
        assert num_steps >= 4
        taken_s = number(server, "slosched:schedule_seconds_sum")
        assert taken_s == pytest.approx(0.003 * num_steps)
