"""Wrong settings are refused at start, and a faulty policy or request does not stop the engine."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import (
    Arrival,
    Loop,
    Workload,
    make_config,
    make_request,
    make_scheduler,
    random_workload,
)
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason

from slosched.core import (
    EndReason,
    LatencyModel,
    Policy,
    Request,
    SchedulerOutput,
    SchedulerView,
    SloschedError,
)
from slosched.integrations.vllm import SLOScheduler
from slosched.integrations.vllm.hooks import (
    UnsupportedVLLMError,
    check_class,
    check_instance,
    installed_version,
)
from slosched.integrations.vllm.settings import Settings, SettingsError
from slosched.integrations.vllm.truth import Fallback
from slosched.integrations.vllm.warp import warped
from slosched.perfmodel import load_model
from slosched.policy import FCFS, Door
from slosched.policy.door import Refuse

SEED = 3


def start(settings: dict[str, Any], workload: Workload | None = None, **options: Any) -> Any:
    workload = workload or random_workload(SEED)
    return make_scheduler(SLOScheduler, make_config(workload, settings=settings, **options))


def finished(steps: list[Any]) -> dict[str, Any]:
    """Return how each request ended, and its stop reason."""
    return {
        name: (reason, stop_reason)
        for step in steps
        for name, _, reason, stop_reason in step.outputs
        if reason is not None
    }


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"policy": "fsfc"}, "no policy 'fsfc'"),
        ({"policy": "fcfs:margin=1"}, "no option"),
        ({"polcy": "fcfs"}, "did you mean policy"),
        ({"policy": "fcfs", "profile": "no/such-model"}, "no latency model"),
        ({"policy": "fcfs", "profile": "rtx4090/llama-3.1-8b"}, "but this device is"),
        ({"policy": "goodput"}, "name a latency model as slosched.profile"),
        ({"policy": "fcfs", "slo_ttft_s": -1}, "slo_ttft_s"),
        ({"policy": "fcfs", "slo_tpot_s": "fast"}, "slo_tpot_s"),
        ({"policy": "fcfs", "slo_tiers": {"gold": {"ttft": 1}}}, "slo_tiers.gold"),
        ({"policy": "fcfs", "deadline_rule": "soon"}, "deadline_rule"),
    ],
)
def test_bad_settings_are_refused_at_start(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SloschedError, match=complaint):
        start(settings)


@pytest.mark.parametrize(
    ("served", "is_another"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", False),
        ("/root/.cache/slosched/models/smollm2-135m-v1", False),
        ("/models/run42", False),
        ("SmolLM2-360M", True),
        ("meta-llama/Llama-3.1-8B", True),
    ],
)
def test_a_profile_of_another_model_is_refused(served: str, is_another: bool) -> None:
    settings = Settings(profile="cpu/smollm2-135m")
    device = load_model("cpu/smollm2-135m").provenance["device"]
    if not is_another:
        assert settings.make_model(device, [served]) is not None
        return
    with pytest.raises(SettingsError, match="measured with smollm2-135m, but this server's"):
        settings.make_model(device, [served])
    assert replace(settings, any_device=True).make_model(device, [served]) is not None


@pytest.mark.parametrize(
    "option",
    [
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
        {"prefill_schedule_interval": 2},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_decide_in_the_policys_place_are_refused(option: dict[str, Any]) -> None:
    workload = random_workload(SEED)
    if tokens := option.pop("max_num_batched_tokens", None):
        workload = replace(workload, max_num_batched_tokens=tokens)
    with pytest.raises(UnsupportedVLLMError, match="slosched cannot schedule"):
        start({"policy": "fcfs"}, workload, **option)


def test_a_diffusion_model_is_refused() -> None:
    """vLLM would take a scheduler class for those, were it not given ours."""
    config = make_config(random_workload(SEED), settings={"policy": "fcfs"})
    config.model_config.hf_config.canvas_length = 32
    vars(config.model_config).pop("is_diffusion", None)  # it was read before
    with pytest.raises(UnsupportedVLLMError, match="diffusion models are not supported"):
        make_scheduler(SLOScheduler, config)


def test_this_vllm_is_among_those_that_are_called_tested() -> None:
    found = installed_version()
    assert found is not None
    found.check()  # if all other files pass with this version, add it to hooks.TESTED_VERSIONS


def test_a_vllm_without_a_hook_is_refused() -> None:
    class Renamed(Scheduler):
        def _reserve_prefill_lookahead(self, request: Any, num_new_tokens: int) -> int:
            return num_new_tokens

    with pytest.raises(UnsupportedVLLMError, match="_reserve_prefill_lookahead"):
        check_class(Renamed)

    class NotAsked(Scheduler):
        def schedule(self, throttle_prefills: bool = False) -> Any:
            return None

    with pytest.raises(UnsupportedVLLMError, match="called for running"):
        check_class(NotAsked)
    with pytest.raises(UnsupportedVLLMError, match=r"kv_cache_manager\.block_pool"):
        check_instance(object())


@dataclass
class Raises(FCFS):
    """fcfs that raises at every third step."""

    num_calls: int = 0

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            raise RuntimeError("a bug")
        return super().schedule(view)


@dataclass
class Greedy(Raises):
    """fcfs that plans more than a step may hold at every third one."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        try:
            return super().schedule(view)
        except RuntimeError:
            limit = view.limits.max_num_batched_tokens
            return SchedulerOutput({r.request_id: limit + 1 for r in view.running})


@dataclass
class Turns(Policy):
    """A policy that runs one request in each step, those with fewer tokens first, and then raises."""

    num_calls: int = 0

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        self.num_calls += 1
        if self.num_calls > 4:
            raise RuntimeError("a bug")
        requests = [*view.running, *view.waiting]
        following = min(requests, key=lambda r: r.num_output_tokens, default=None)
        if following is None:
            return SchedulerOutput()
        num_left = following.num_tokens - following.num_computed_tokens
        return SchedulerOutput({following.request_id: num_left})


@dataclass
class Idle(Policy):
    """A policy that never runs anything."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return SchedulerOutput()


@dataclass
class RejectsLong(FCFS):
    """A policy that rejects every prompt of more than `most` tokens."""

    most: int = 8

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        for request in view.waiting:
            if request.num_prompt_tokens > self.most and not request.num_output_tokens:
                return SchedulerOutput(rejected={request.request_id: EndReason.INFEASIBLE})
        return super().schedule(view)


@dataclass
class Remembers(RejectsLong):
    """A policy that keeps every request that it saw."""

    seen: dict[str, Request] = field(default_factory=dict)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        for request in (*view.waiting, *view.running):
            assert self.seen.setdefault(request.request_id, request) is request
            assert not request.status.is_ended
            assert len(request.token_times_s) == request.num_output_tokens
        return super().schedule(view)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["Raises", "Greedy"])
def test_where_a_policy_fails_vllms_own_order_holds_and_nobody_is_lost(
    policy: str, is_async: bool
) -> None:
    workload = random_workload(SEED)
    scheduler = start({"policy": f"{__name__}:{policy}"}, is_async=is_async)
    ends = finished(Loop(scheduler, workload, is_async).run())
    assert ends.keys() == {arrival.request_id for arrival in workload.arrivals}
    assert all(stop_reason is None or stop_reason == 3 for _, stop_reason in ends.values())
    assert scheduler.truth.fallbacks[Fallback.RAISED] > 1
    assert not scheduler.truth.divergences


@pytest.mark.parametrize("then", ["fails", "pauses"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_adapters_that_ran_in_turns_do_not_end_the_engine(is_async: bool, then: str) -> None:
    """vLLM's own order runs all that run at once, and asserts that their adapters fit."""
    workload = replace(random_workload(SEED), arrivals=(), num_blocks=100, stop_chance=0.0)
    config = make_config(workload, is_async=is_async, settings={"policy": f"{__name__}:Turns"})
    config.lora_config = LoRAConfig(max_loras=1, max_lora_rank=8)
    scheduler = make_scheduler(SLOScheduler, config)
    for place in (1, 2):
        arrival = Arrival(0, f"r{place}", (7, 8, 9), max_tokens=5)
        request = make_request(arrival, workload.block_size, 0.0)
        request.lora_request = LoRARequest(f"adapter{place}", place, "/nowhere")
        scheduler.add_request(request)
    loop = Loop(scheduler, workload, is_async)
    steps = [loop.step() for _ in range(4)]
    assert len(scheduler.running) == 2, "each with an adapter of its own"
    if then == "pauses":
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        steps += [loop.step() for _ in range(9)]
        scheduler.set_pause_state(PauseState.UNPAUSED)
    ends = finished(steps + loop.run())
    assert ends == dict.fromkeys(("r1", "r2"), (FinishReason.LENGTH, None))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_adapter_loaded_anew_under_its_name_is_another_one(is_async: bool) -> None:
    """vLLM counts adapters by number: who still runs with the old one cannot share a step."""
    workload = Workload(1, (), 64, 8, 16, 4, 128, stop_chance=0.0)
    config = make_config(workload, is_async=is_async, settings={"policy": "sjf"})
    config.lora_config = LoRAConfig(max_loras=1, max_lora_rank=8)
    scheduler = make_scheduler(SLOScheduler, config)
    loop, steps = Loop(scheduler, workload, is_async), []
    for number, num_tokens in ((1, 80), (2, 16)):
        arrival = Arrival(0, f"r{number}", tuple(range(num_tokens)), max_tokens=5)
        request = make_request(arrival, workload.block_size, 0.0)
        request.lora_request = LoRARequest("reloaded", number, "/nowhere")
        scheduler.add_request(request)
        steps.append(loop.step())
    ends = finished(steps + loop.run())
    assert ends == dict.fromkeys(("r1", "r2"), (FinishReason.LENGTH, None))
    assert not scheduler.truth.divergences


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_policy_that_never_runs_anything_cannot_stop_the_server(is_async: bool) -> None:
    workload = random_workload(SEED)
    workload = replace(workload, arrivals=(replace(workload.arrivals[0], call=0, max_tokens=1),))
    scheduler = start({"policy": f"{__name__}:Idle"}, workload, is_async=is_async)
    loop = Loop(scheduler, replace(workload, arrivals=()), is_async)
    scheduler.add_request(make_request(workload.arrivals[0], workload.block_size, 0.0))
    deadline_s = time.monotonic() + 60
    while scheduler.requests and time.monotonic() < deadline_s:
        loop.step()
    assert not scheduler.requests
    assert scheduler.truth.fallbacks[Fallback.STALLED] >= 1


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_plan_for_which_vllm_has_no_room_cannot_stop_the_server(is_async: bool) -> None:
    """A draft model needs blocks of which a plan does not know; vllm_v0 plans the prompt alone."""
    workload = Workload(1, (), 12, 8, 64, 4, 128, stop_chance=0.0)
    config = make_config(workload, is_async=is_async, settings={"policy": "vllm_v0"})
    scheduler = make_scheduler(SLOScheduler, config)
    scheduler.num_lookahead_tokens = 4
    loop, steps = Loop(scheduler, workload, is_async), []
    for name, num_tokens in (("r0", 20), ("r1", 64)):
        arrival = Arrival(0, name, tuple(range(num_tokens)), max_tokens=10)
        scheduler.add_request(make_request(arrival, workload.block_size, 0.0))
        steps.append(loop.step())
    while scheduler.requests and loop.num_calls < 200:
        steps.append(loop.step())
    assert finished(steps) == dict.fromkeys(("r0", "r1"), (FinishReason.LENGTH, None))
    assert scheduler.truth.fallbacks[Fallback.STALLED] >= 1


@dataclass
class RejectsNew(FCFS):
    """fcfs that starts the first request only, and rejects all others at once."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        if new := [r.request_id for r in view.waiting if r.request_id != "r0"]:
            return SchedulerOutput({}, rejected=dict.fromkeys(new, EndReason.OVERLOAD))
        return super().schedule(view)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["edf", "sjf", "goodput+door"])
def test_no_image_waits_for_one_whose_turn_comes_later(policy: str, is_async: bool) -> None:
    """The first request has its image in the encoder's cache, which has room for no other one."""
    workload = Workload(1, (), 64, 8, 16, 5, 256, stop_chance=0.0)
    settings = {"policy": policy, "emulate": "h100/llama-3.1-8b"}
    config = make_config(workload, is_async=is_async, settings=settings)
    scheduler = make_scheduler(SLOScheduler, config)
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=40)
    scheduler.max_num_encoder_input_tokens = 40
    loop, steps = Loop(scheduler, workload, is_async), []
    names = [f"r{number}" for number in range(4)]
    for number, name in enumerate(names):
        said = (("slo_ttft_ms", 1e6 / (number + 1)),)
        arrival = Arrival(0, name, tuple(range(100 - number)), max_tokens=3, extra_args=said)
        request = make_request(arrival, workload.block_size, time.time())
        place = PlaceholderRange(offset=0, length=40)
        request.mm_features = [MultiModalFeatureSpec(None, "image", name, place)]
        scheduler.add_request(request)
        steps.append(loop.step())
    while scheduler.requests and loop.num_calls < 200:
        steps.append(loop.step())
    assert finished(steps) == dict.fromkeys(names, (FinishReason.LENGTH, None))
    assert not scheduler.truth.fallbacks


def test_after_a_pause_the_policy_still_decides() -> None:
    """A server without requests does not stand still, however long the pause is."""
    workload = replace(random_workload(SEED), arrivals=())
    with warped() as clock:
        scheduler = start({"policy": f"{__name__}:RejectsNew"}, workload)
        loop, ends = Loop(scheduler, workload, is_async=False), {}
        for name in ("r0", "r1"):
            arrival = Arrival(0, name, tuple(range(5)), max_tokens=3)
            scheduler.add_request(make_request(arrival, workload.block_size, clock.now_s()))
            while name not in ends:
                ends |= finished([loop.step()])
            clock.sleep(60)
    assert not scheduler.truth.fallbacks
    assert ends["r0"] == (FinishReason.LENGTH, None)
    assert ends["r1"][0] is FinishReason.ABORT


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("stop_chance", "reason"), [(0.0, EndReason.LENGTH), (0.1, EndReason.STOP)]
)
def test_who_remembers_a_request_sees_how_it_ended(
    stop_chance: float, reason: EndReason, is_async: bool
) -> None:
    workload = replace(random_workload(SEED), stop_chance=stop_chance)
    scheduler = start({"policy": f"{__name__}:Remembers"}, workload, is_async=is_async)
    steps = Loop(scheduler, workload, is_async).run()
    num_tokens = Counter[str]()
    for step in steps:
        for name, tokens, *_ in step.outputs:
            num_tokens[name] += len(tokens)
    scheduler.schedule()  # ends are noticed when the next step is planned
    seen = scheduler._link._policy.seen
    assert seen.keys() == {arrival.request_id for arrival in workload.arrivals}
    reasons = set()
    for name, (finished_as, _) in finished(steps).items():
        request = seen[name]
        reasons.add(request.end_reason)
        assert request.status.is_ended
        assert request.num_output_tokens == num_tokens[name] == len(request.token_times_s)
        assert request.num_output_placeholders == 0
        expected = {FinishReason.STOP: EndReason.STOP, FinishReason.LENGTH: EndReason.LENGTH}
        assert request.end_reason is expected.get(finished_as, EndReason.INFEASIBLE)
    assert reasons >= {reason, EndReason.INFEASIBLE}


@dataclass
class Mute(Door):
    """A door that cannot say when a client should come again."""

    refuse: Refuse = Refuse.NOTHING

    def retry_after_s(self, request: Request, model: LatencyModel) -> float:
        raise RuntimeError("a bug")


def test_a_door_that_fails_when_asked_when_to_come_again_does_not_stop_the_engine() -> None:
    workload = random_workload(SEED)
    profile = {"profile": "rtx4090/llama-3.1-8b", "any_device": True}
    scheduler = start({"policy": f"{__name__}:RejectsLong+{__name__}:Mute", **profile}, workload)
    ends = finished(Loop(scheduler, workload, is_async=False).run())
    long = {a.request_id for a in workload.arrivals if len(a.prompt) > 8}
    assert ends.keys() == {a.request_id for a in workload.arrivals}
    rejected = (FinishReason.ABORT, "slo_rejected:infeasible")
    assert {name for name, end in ends.items() if end == rejected} == long
    assert scheduler.truth.num_silences == len(long)
    assert not scheduler.truth.fallbacks


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_rejected_request_ends_with_the_reason_and_the_others_are_served(is_async: bool) -> None:
    workload = random_workload(SEED)
    scheduler = start({"policy": f"{__name__}:RejectsLong"}, is_async=is_async)
    ends = finished(Loop(scheduler, workload, is_async).run())
    long = {a.request_id for a in workload.arrivals if len(a.prompt) > 8}
    assert 0 < len(long) < len(ends) == len(workload.arrivals)
    for name, (reason, stop_reason) in ends.items():
        if name in long:
            assert (reason, stop_reason) == (FinishReason.ABORT, "slo_rejected:infeasible")
        else:
            assert reason is not FinishReason.ABORT
    assert scheduler.truth.rejections == {EndReason.INFEASIBLE: len(long)}
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == workload.num_blocks - 1


@pytest.mark.parametrize("late", [("r4",), ("r3", "r4"), ("r2", "r4"), ("r1", "r2", "r3", "r4")])
def test_whoever_is_not_rejected_keeps_its_place(late: tuple[str, ...]) -> None:
    """The rejected are the last of vLLM's queue, or not all of them are."""
    workload = replace(random_workload(SEED), max_num_seqs=1)
    scheduler = start({"policy": "fcfs:drop=expired"}, workload)
    for name in ("r0", "r1", "r2", "r3", "r4"):
        args = (("slo_ttft_ms", 0.001),) if name in late else ()
        arrival = Arrival(0, name, (5, 6, 7), max_tokens=4, extra_args=args)
        scheduler.add_request(make_request(arrival, workload.block_size, time.time() - 1))
    scheduler.schedule()
    left = [name for name in ("r1", "r2", "r3", "r4") if name not in late]
    assert [request.request_id for request in scheduler.waiting] == left
    assert scheduler.finished_req_ids == set()
    assert list(scheduler.requests) == ["r0", *left]
    assert scheduler.truth.rejections == {EndReason.EXPIRED: len(late)}


def test_a_request_with_an_impossible_promise_is_refused_and_the_others_are_served() -> None:
    workload = random_workload(SEED)
    first, *rest = workload.arrivals
    bad = replace(first, extra_args=(("slo_ttft_ms", -5),))
    workload = replace(workload, arrivals=(bad, *rest))
    scheduler = start({"policy": "fcfs"})
    ends = finished(Loop(scheduler, workload, is_async=False).run())
    reason, stop_reason = ends.pop(bad.request_id)
    assert reason is FinishReason.ABORT
    assert stop_reason.startswith("slo_invalid:slo_ttft_ms must be a positive")
    assert len(ends) == len(rest)
    assert all(reason is not FinishReason.ABORT for reason, _ in ends.values())


@pytest.mark.parametrize(
    ("policy", "reasons"),
    [("portfolio", {"infeasible", "expired"}), ("goodput+door", {"unkeepable"})],
)
def test_a_promise_that_cannot_be_kept_is_refused_with_its_reason(
    policy: str, reasons: set[str]
) -> None:
    workload = random_workload(SEED)
    first, *rest = workload.arrivals
    hasty = replace(first, extra_args=(("slo_ttft_ms", 0.001),))
    workload = replace(workload, arrivals=(hasty, *rest))
    profile = {"profile": "rtx4090/llama-3.1-8b", "any_device": True}
    scheduler = start({"policy": policy, **profile})
    ends = finished(Loop(scheduler, workload, is_async=False).run())
    end, stop_reason = ends.pop(hasty.request_id)
    assert end is FinishReason.ABORT
    word, _, why = stop_reason.partition(":")
    assert (word, why.split(";")[0] in reasons) == ("slo_rejected", True), stop_reason
    assert len(ends) == len(rest)
    assert all(end is not FinishReason.ABORT for end, _ in ends.values())
