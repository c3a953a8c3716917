"""The simulated replica that a command's options describe, and replays on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import TaskID

from slosched.cli import options
from slosched.cli.console import console, progress_bar
from slosched.cli.inert_options import note_idle_failures, note_inert, note_late_failures
from slosched.cli.sigterm import sigterm_as_ctrl_c
from slosched.cli.speculation import Speculate
from slosched.core import Limits, Policy
from slosched.evaluate.comparison import Comparison, Replica, compare, kv_capacity_tokens
from slosched.kv import Eviction, HostWrites, PrefixCaching
from slosched.perfmodel import (
    DEFAULT_MODEL,
    FittedModel,
    ServerTime,
    at_block_size,
    load_model,
    with_swap_bandwidth,
)
from slosched.perfmodel.profiled_range import beyond_range
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.drafts import SimulatedDrafts
from slosched.simulator.scheduling_time import MEASURED, ScheduleTime
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace


@dataclass(frozen=True)
class Stall:
    """A stall of the device: its length, and the mean time between two stalls."""

    lasts_s: float
    every_s: float


def stall(text: str) -> Stall:
    """Return the stall that a text such as "200ms/10s" means; raise BadParameter for any other."""
    lasts, slash, every = text.partition("/")
    if not slash:
        raise typer.BadParameter(f"{text!r} is not TIME/EVERY, as in 200ms/10s")
    return Stall(options.duration(lasts), options.duration(every))


def schedule_time(text: str) -> ScheduleTime:
    """Return seconds or MEASURED for "5ms" or "measured"; raise BadParameter for other texts."""
    return MEASURED if text == MEASURED else options.duration(text, may_be_zero=True)


def server_time(text: str) -> ServerTime:
    """Return the times of "9ms", "9ms,0.3ms" or "9ms,0.3ms,1ms"; raise BadParameter for others."""
    times_s = [options.duration(part, may_be_zero=True) for part in text.split(",")]
    if len(times_s) > len(fields(ServerTime)):
        raise typer.BadParameter(f"{text!r} is not REQUEST[,DEVICE[,HOST]], as in 9ms,0.3ms,1ms")
    return ServerTime(*times_s)


@dataclass(frozen=True)
class ReplicaOptions:
    """The options that describe the simulated replica."""

    latency_model: options.LatencyModelName = None
    noise: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Sigma of a lognormal factor on every simulated step's time: 0.1.  Default: how "
            "the latency model's steps scattered, if it says so, else 0.",
        ),
    ] = None
    drift: Annotated[
        float,
        typer.Option(
            help="Share by which the simulated device becomes slower and faster again, in a cycle "
            "of two minutes: 0.2 for 20 %."
        ),
    ] = 0.0
    tail: Annotated[
        float,
        typer.Option(
            help="Share of the simulated steps that take at least twice as long: 0.01 for 1 %."
        ),
    ] = 0.0
    stall: Annotated[
        Stall | None,
        typer.Option(
            parser=stall,
            metavar="TIME/EVERY",
            help="Stalls of the simulated device at random times: 200ms/10s is 200 ms, every 10 s "
            "on average.",
        ),
    ] = None
    bias: Annotated[
        float,
        typer.Option(
            help="How wrong the policy's latency model is: at 1.2, simulated steps take 20 % "
            "longer than it is told.  The simulated device stays the same."
        ),
    ] = 1.0
    swap_bandwidth: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="GB/s",
            help="Bandwidth of the link between device and host in each direction, for swapped KV "
            "blocks and --prefix-host-tokens: 25; inf makes copies free.  Default: that of the "
            "latency model.",
        ),
    ] = None
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Let the policy's latency model learn from the simulated steps, as `serve` does.",
        ),
    ] = False
    server_time: Annotated[
        ServerTime | None,
        typer.Option(
            parser=server_time,
            metavar="REQUEST[,DEVICE[,HOST]]",
            help="What the server adds to its device: to the first token of each request, to each "
            "step on the device, and to each step on the host: 9ms, or 9ms,0.3ms,1ms; 0 is the "
            "bare device.  Default: the latency model's own, if it has them.",
        ),
    ] = None
    schedule_time: Annotated[
        # `ScheduleTime`, but typer takes no unions.
        Any,
        typer.Option(
            parser=schedule_time,
            metavar="TIME|measured",
            help="The host's time for each step, in place of HOST of --server-time: 5ms, or "
            "`measured` for as long as decisions take on this machine (not reproducible).",
        ),
    ] = None
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap/--no-overlap",
            help="Plan each step while the one before it runs: this hides the host's time, but "
            "each plan knows one step less.",
        ),
    ] = False
    client_timeout: Annotated[
        float | None,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="Time from its arrival after which a client without its whole answer disconnects: "
            "60s.  The request is aborted, and is a miss.  Default: clients wait.",
        ),
    ] = None
    max_loras: Annotated[
        int | None,
        typer.Option(min=1, help="Different LoRA adapters in one step.  Default: no limit."),
    ] = None
    long_prefill_token_threshold: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Most tokens of one request in a step, unless it is alone, whatever the policy: "
            "vLLM's option of this name.  Default: no limit.",
        ),
    ] = None
    watermark: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=0.99,
            metavar="SHARE",
            help="Share of the KV blocks that the start of a request leaves free, unless none "
            "runs, whatever the policy: vLLM's option of this name.",
        ),
    ] = 0.0
    speculate: Speculate = None
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of the draft tokens of --speculate that are accepted, among those before "
            "which all were: 0.7.  Simulated requests have no text, so each has as many drafts as "
            "it may verify.",
        ),
    ] = None
    sliding_window: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="The last tokens that a token sees, if all layers of the model have a sliding "
            "window: 4096.  Requests then give back the KV blocks that no token sees any more, but "
            "for those that others may share.  Default: tokens see all before them.",
        ),
    ] = None
    prefix_cache: options.PrefixCache = PrefixCaching.OFF
    prefix_cache_eviction: options.PrefixCacheEviction = Eviction.LRU
    prefix_host_tokens: options.PrefixHostTokens = 0
    prefix_host_writes: options.PrefixHostWrites = HostWrites.BACK

    def open(self, limits: Limits, kv: options.KVOptions, seed: int) -> Replica:
        """Return the replica. Without --latency-model it is a bundled GPU, `DEFAULT_MODEL`."""
        self.prefix_cache.check(self.prefix_cache_eviction)
        name = DEFAULT_MODEL if self.latency_model is None else self.latency_model
        model = load_model(name)
        extrapolated = beyond_range(model, limits.max_num_batched_tokens)
        if extrapolated:
            console.print(f"[yellow]note:[/] {escape(extrapolated)}")
        if self.swap_bandwidth is not None:
            model = with_swap_bandwidth(model, 1e9 * self.swap_bandwidth)
        model = at_block_size(model, kv.block_size)
        host = (self.prefix_host_tokens, self.prefix_host_writes, kv.block_size)
        num_blocks = kv.num_blocks(kv_capacity_tokens(model))
        config = SimulationConfig(
            limits=replace(
                limits,
                max_loras=self.max_loras,
                max_chunk_tokens=self.long_prefill_token_threshold,
                # vLLM's count includes its null block, which holds nothing.
                num_watermark_blocks=int(self.watermark * (num_blocks + 1)),
            ),
            num_blocks=num_blocks,
            block_size=kv.block_size,
            num_host_blocks=kv.num_host_blocks,
            prefix_cache=self.prefix_cache,
            eviction=self.prefix_cache_eviction,
            prefix_host=options.prefix_host(self.prefix_cache, *host),
            window_tokens=self.sliding_window,
            disturbances=self._disturbances(model),
            bias=self.bias,
            online=self.online,
            schedule_s=MEASURED if self.schedule_time == MEASURED else 0.0,
            overlap=self.overlap,
            client_timeout_s=self.client_timeout,
            drafts=self._drafts(),
            seed=seed,
        )
        return Replica.of(model, name, config, self._server_time(model))

    def _drafts(self) -> SimulatedDrafts | None:
        if self.speculate is None and self.acceptance is None:
            return None
        if self.speculate is None or self.acceptance is None:
            raise ValueError(
                "a simulated device has no text to find drafts in, so --speculate needs "
                "--acceptance and the other way round: --speculate ngram:4 --acceptance 0.7"
            )
        return SimulatedDrafts(self.speculate.num_draft_tokens, self.acceptance)

    def _disturbances(self, model: FittedModel) -> Disturbances:
        noise = model.noise if self.noise is None else self.noise
        disturbances = Disturbances(noise, self.drift, self.tail)
        if self.stall is None:
            return disturbances
        lasts_s, every_s = self.stall.lasts_s, self.stall.every_s
        return replace(disturbances, stall_s=lasts_s, stall_every_s=every_s)

    def _server_time(self, model: FittedModel) -> ServerTime:
        """Return what was asked for, else the latency model's own times."""
        times = model.server_time if self.server_time is None else self.server_time
        if self.schedule_time is None:
            return times
        host_s = 0.0 if self.schedule_time == MEASURED else self.schedule_time
        return replace(times, per_step_host_s=host_s)


def simulate_contenders(
    trace: Trace, contenders: Mapping[str, tuple[Policy, Replica]]
) -> Comparison:
    """Compare the contenders with a progress bar, after notes on options that change nothing."""
    policies = {name: policy for name, (policy, _) in contenders.items()}
    replicas = [replica for _, replica in contenders.values()]
    note_inert(trace, policies, replicas)
    note_late_failures(trace, replicas)
    with progress_bar() as progress, sigterm_as_ctrl_c():
        tasks: dict[str, TaskID] = {}

        def advance(name: str, num_ended: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(f"simulating {name}", total=len(trace))
            progress.advance(tasks[name], num_ended)

        comparison = compare(trace, contenders, advance)
    note_idle_failures(trace, contenders, comparison.outcomes)
    return comparison
