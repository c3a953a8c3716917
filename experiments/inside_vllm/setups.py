"""The setups: devices, traces, SLOs and loads, and the schedulers in front of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.inside_vllm.server import Launch
from slosched.core import DeadlineRule, Limits
from slosched.engine.torch.embedded import embedded_model_dir
from slosched.evaluate.capacity.windows import window
from slosched.perfmodel import NO_SERVER_TIME, FittedModel, load_model, scaled
from slosched.perfmodel.forms import described
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Proportional, Trace, read_trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
RESULTS = Path(__file__).parent / "results"
RULE = DeadlineRule.MEAN_TPOT
_PLUGIN = "slosched.integrations.vllm"


@dataclass(frozen=True)
class System:
    """vLLM with its own scheduler, or with a policy of slosched's in front of it."""

    max_num_batched_tokens: int
    policy: str | None = None

    @property
    def name(self) -> str:
        return self.policy or f"vLLM {self.max_num_batched_tokens}"

    @property
    def simulated_policy(self) -> str:
        return self.policy or "vllm_v1"


@dataclass(frozen=True)
class Setup:
    """One device under one trace.  Times and rates are the device's, not those of slow motion."""

    name: str
    title: str
    trace: str
    latency_model: str
    """The model with which policies predict, and by which an emulated device takes its time.

    For a device that is not emulated it is a file, made by device.py."""
    rates: tuple[float, ...]
    """Requests/s offered; vLLM at its best budget has its knee (90 % in time) near the first."""
    budgets: tuple[int, ...]
    """Values of `--max-num-batched-tokens` that are tried with vLLM's own scheduler."""
    policy_budget: int
    """The most tokens that slosched's policies may put into a step."""
    num_requests: int
    """Requests in one run."""
    num_parts: int
    """Parts of the trace that are played at every rate, the first ones.

    More are used where the parts differ more."""
    base_s: float
    """The TTFT of a prompt is this time plus twice its unloaded prefill."""
    tpot_s: float
    max_model_len: int
    max_num_seqs: int = 256
    """Must be at most the smallest token budget, or vLLM does not start."""
    is_emulated: bool = True
    slowdown: float = 1.0
    length_scale: float = 1.0
    """A factor for the trace's prompts and outputs, for devices that are small."""
    block_size: int = 16
    """Block size in tokens; vLLM's attention on CPUs needs a multiple of 32."""
    kv_tokens: int | None = None
    """Capacity of the KV cache; None for that of the latency model's device."""
    dtype: str = "auto"
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    policies: tuple[str, ...] = ("slo_aware", "goodput")
    rivals: tuple[System, ...] = ()
    """Further systems, with the settings that are best for them."""
    first_tuning_part: int = 20
    """The first part of the trace on which vLLM is tuned; it must come after all that are played.
    """
    num_tuning_parts: int = 1

    @cached_property
    def model(self) -> FittedModel:
        """Return the latency model of the bare device, in slow motion.

        What the server adds is measured.
        """
        bundled = load_model(self.latency_model)
        bare = described(
            bundled, bundled.provenance, bundled.held_out_error, server_time=NO_SERVER_TIME
        )
        return scaled(bare, self.slowdown)

    @property
    def untuned(self) -> tuple[System, ...]:
        return tuple(System(budget) for budget in self.budgets)

    def systems(self, best_budget: int) -> tuple[System, ...]:
        ours = (System(self.policy_budget, policy) for policy in self.policies)
        return (System(best_budget), *ours, *self.rivals)

    def load(self, rate: float, number: int) -> Trace:
        """Return the `number`-th part of the trace at `rate`, as it is sent: in slow motion."""
        whole = read_trace(TRACES / self.trace)
        promise = Proportional(
            self.model.predict_prefill,
            2.0,
            self.tpot_s * self.slowdown,
            self.base_s * self.slowdown,
        )
        part = window(whole, self.num_requests, number)
        if self.length_scale != 1.0:
            part = part.with_lengths_scaled(self.length_scale)
        part = part.scaled_to(rate / self.slowdown)
        longest = self.max_model_len // 4
        return part.clipped(self.max_model_len - longest, longest - 1).trace.with_slo(promise)

    def engine_options(self, system: System) -> tuple[str, ...]:
        """Return the options of `vllm serve` that concern the engine and its scheduler."""
        options = [
            *("--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(system.max_num_batched_tokens)),
            *("--block-size", str(self.block_size), "--dtype", self.dtype),
            "--no-enable-prefix-caching",
            *self.options,
        ]
        if self.kv_tokens is not None:  # one block is vLLM's own
            num_blocks = self.kv_tokens // self.block_size + 1
            options += ["--num-gpu-blocks-override", str(num_blocks)]
        if system.policy is not None:
            options += ["--scheduler-cls", f"{_PLUGIN}.SLOScheduler"]
        return tuple(options)

    def engine_settings(self, system: System) -> dict[str, Any]:
        """Return the `slosched` part of vLLM's additional config, without a recording."""
        settings: dict[str, Any] = {}
        if self.is_emulated:
            settings |= {"emulate": self.latency_model, "emulate_slowdown": self.slowdown}
        if system.policy is not None:
            settings["policy"] = system.policy
            if not self.is_emulated:
                settings["profile"] = self.latency_model
        return settings

    def launch(self, system: System, steps: Path) -> Launch:
        """Return how to start the server; slosched's policies record their steps in `steps`."""
        options = [*self.engine_options(system), "--middleware", f"{_PLUGIN}.SLOMiddleware"]
        if self.is_emulated:
            options += ["--distributed-executor-backend", f"{_PLUGIN}.EmulatedExecutor"]
        settings = self.engine_settings(system)
        if system.policy is not None:
            settings["record"] = str(steps)
        return Launch(embedded_model_dir(), tuple(options), settings, self.environment)

    def simulation(self, system: System) -> SimulationConfig:
        """Return the same server for the simulator.

        vLLM plans ahead of an emulated device, as it does of a GPU.
        """
        capacity = self.kv_tokens or int(self.model.provenance["kv_capacity_tokens"])
        return SimulationConfig(
            limits=Limits(
                max_num_batched_tokens=system.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                deadline_rule=RULE,
            ),
            num_blocks=capacity // self.block_size,
            block_size=self.block_size,
            online=system.policy is not None,
            overlap=self.is_emulated,
        )


_EMULATED = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
_H100 = "h100/llama-3.1-8b"

SETUPS = {
    setup.name: setup
    for setup in (
        Setup(
            name="conv-h100",
            title="Azure's conversations on an emulated H100 (8B)",
            trace="azure_conv_2023.csv",
            latency_model=_H100,
            rates=(20.0, 28.0, 40.0),
            budgets=(512, 1024, 2048, 8192),
            policy_budget=8192,
            num_requests=200,
            num_parts=8,
            base_s=0.5,
            tpot_s=0.025,
            max_model_len=16_384,
            slowdown=3.0,
            environment=_EMULATED,
        ),
        Setup(
            name="code-h100",
            title="Azure's code completions on an emulated H100 (8B)",
            trace="azure_code_2023.csv",
            latency_model=_H100,
            rates=(4.5, 6.0, 9.0),
            budgets=(256, 512, 1024, 2048, 8192),
            policy_budget=8192,
            num_requests=100,
            num_parts=15,
            base_s=0.5,
            tpot_s=0.025,
            max_model_len=16_384,
            environment=_EMULATED,
        ),
        Setup(
            name="conv-cpu",
            title="Azure's conversations, an eighth as long, on one core (SmolLM2-135M)",
            trace="azure_conv_2023.csv",
            latency_model=str(RESULTS / "conv-cpu-device.json"),
            rates=(2.0, 3.0, 4.0),
            budgets=(64, 128, 256),
            policy_budget=256,
            num_requests=24,
            num_parts=10,
            base_s=2.0,
            tpot_s=0.3,
            max_model_len=2048,
            max_num_seqs=64,
            is_emulated=False,
            length_scale=1 / 8,
            options=("--enforce-eager",),
            block_size=32,
            kv_tokens=16_384,
            dtype="float32",
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model in the engine core's process
            },
        ),
    )
}


def smoke(setup: Setup) -> Setup:
    """Return the setup with so few requests that it takes a minute or two, as a smoke test."""
    return replace(
        setup,
        num_requests=10,
        num_parts=1,
        num_tuning_parts=1,
        rates=setup.rates[:1],
        budgets=setup.budgets[-2:],
    )
