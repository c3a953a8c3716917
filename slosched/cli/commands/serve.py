"""`slosched serve`: an OpenAI-compatible server that schedules for SLOs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from slosched.cli import options, vllm
from slosched.cli.adapters import AdapterOptions
from slosched.cli.calibration import calibrated_model
from slosched.cli.console import console
from slosched.cli.ending import EndingAtOnce
from slosched.cli.local_model import (
    ExtraMissingError,
    LocalModel,
    make_grammars,
    make_tokenizer,
    open_local,
    runs_on_cpu,
)
from slosched.cli.network_options import NetworkOptions
from slosched.cli.operator_options import OperatorOptions
from slosched.cli.option_groups import grouped
from slosched.cli.promised import promised
from slosched.cli.ray_serve import RayOptions, state_key
from slosched.cli.service_options import ServiceOptions
from slosched.cli.sigterm import stopped_aloud
from slosched.cli.speculation import Speculate
from slosched.core import NO_SLO, Executor
from slosched.engine.background import InBackground
from slosched.engine.emulated import EmulatedExecutor
from slosched.engine.grammar import GrammarCompiler, NoGrammars
from slosched.engine.log_lines import configure_logging
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.overlap import OverlappedEngine
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.kv import Eviction, HostWrites, Known, KVCache, PrefixCaching
from slosched.perfmodel import (
    NO_SERVER_TIME,
    FittedModel,
    OnlineModel,
    ServerTime,
    load_model,
    with_longer_steps,
)
from slosched.perfmodel.device import check_device, is_of_cpu, other_settings
from slosched.perfmodel.scheduling import check_can_schedule
from slosched.perfmodel.server_time import SERVER_TIME_ORIGIN
from slosched.policy.door import Door, Refuse
from slosched.policy.spec import make_policy
from slosched.scheduler import Scheduler
from slosched.simulator.apart import rehearse_apart

if TYPE_CHECKING:
    from slosched.engine.server import Tokenizer


def _step_timeout(text: str) -> float:
    """Return seconds; infinity for "off" and "0"."""
    return math.inf if str(text).strip() in ("off", "0") else options.duration(text)


@grouped
@stopped_aloud()
def serve(
    context: typer.Context,
    policy: options.PolicyName = "goodput+door",
    promise: options.PromiseOptions = options.PromiseOptions(
        slo_ttft=options.Seconds(1), slo_tpot=options.Seconds(0.1)
    ),
    service: ServiceOptions = ServiceOptions(),
    model: options.ModelOptions = options.ModelOptions(),
    latency_model: options.LatencyModelName = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Accept a --latency-model of another device or file format."),
    ] = False,
    network: NetworkOptions = NetworkOptions(),
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="Load no model: answer with filler text at the speed of this latency model: "
            "h100/llama-3.1-8b.",
        ),
    ] = None,
    limits: options.LimitOptions = options.LimitOptions(),
    kv: options.KVOptions = options.KVOptions(host_kv_tokens=4096),
    calibrate: Annotated[
        float,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="How long the model is profiled on its first start without --latency-model: 2m.",
        ),
    ] = options.Seconds(60),
    recalibrate: Annotated[
        bool,
        typer.Option(
            "--recalibrate", help="Profile the model anew, even if an earlier start has done so."
        ),
    ] = False,
    overlap: Annotated[
        bool,
        typer.Option("--overlap", help="Plan each step while the one before it runs."),
    ] = False,
    prefix_cache: options.PrefixCache = PrefixCaching.OFF,
    prefix_cache_eviction: options.PrefixCacheEviction = Eviction.LRU,
    prefix_host_tokens: options.PrefixHostTokens = 0,
    prefix_host_writes: options.PrefixHostWrites = HostWrites.BACK,
    speculate: Speculate = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="How long a shutdown waits for running requests: 10s.",
        ),
    ] = options.Seconds(30),
    step_timeout: Annotated[
        float,
        typer.Option(
            parser=_step_timeout,
            metavar="TIME|off",
            help="/health and new requests get a 503 while a step takes longer than both this and "
            "20 times the predicted time: 30s.  The first steps get five minutes.",
        ),
    ] = options.Seconds(10),
    hang_timeout: Annotated[
        float,
        typer.Option(
            parser=_step_timeout,
            metavar="TIME|off",
            help="When a step hangs for so long beyond --step-timeout, all requests get an error, "
            "and the server ends with status 1: 5m.",
        ),
    ] = options.Seconds(60),
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="SLOSCHED_API_KEY",
            help="Serve only requests with this key, or one of several, as `Authorization: Bearer "
            "KEY`; /health and /metrics need none.",
        ),
    ] = None,
    operator: OperatorOptions = OperatorOptions(),
    loras: AdapterOptions = AdapterOptions(),
    ray: RayOptions = RayOptions(),
    engine: vllm.EngineName = vllm.Engine.TORCH,
    words: vllm.Words = None,
) -> None:
    """Serve a model over OpenAI's API: completions, chat, responses, models, and /metrics.

    The SLOs given here hold for every request that has none of its own (body fields
    `slo_ttft_ms`, `slo_tpot_ms`, `slo_e2e_ms`, or headers `x-llm-d-slo-ttft-ms`,
    `x-llm-d-slo-tpot-ms`).  A request that cannot be served in time is refused with status 429, the
    reason and when to come again: most at once, when they arrive.  With `-p goodput` (without
    `+door`) they wait until they can no longer be in time.
    `GET /v1/quote?prompt_tokens=512` returns the TTFT and TPOT to expect now.

    Without `--latency-model` the model is profiled for a minute on the first start (`--calibrate`)
    and the result is kept in the cache.  Every start prints its error; `--recalibrate` measures
    anew.

    Examples:

    - a small model on this machine: `slosched serve --slo-ttft 1s --slo-tpot 100ms`
    - two tiers, of which a request names one as `"service_tier": "gold"`: `slosched serve --tier
      gold=ttft:300ms,tpot:30ms --tier batch=ttft:30s,tpot:1s,best-effort,min-share:0.1`
    - at the speed of a GPU, without a GPU: `slosched serve --emulate rtx4090/llama-3.1-8b
      -p edf:drop=expired`
    - four servers on a Ray cluster, behind one address: `slosched serve --ray auto --replicas 4
      --router predicted_ttft --gpus-per-replica 1 Qwen/Qwen3-8B`
    - inside vLLM, with vLLM's own options after `--`: `slosched serve --engine vllm
      meta-llama/Llama-3.1-8B --latency-model h100/llama-3.1-8b --slo-ttft 1s --slo-tpot 50ms --
      --tensor-parallel-size 2`
    """
    if ray.ray is not None:
        ray.serve(network, state_key(api_key or (), service.tenants()), drain_timeout)
        return
    ray.check_unused(context)
    name, rest = vllm.split(words, engine, model.model)
    if engine is vllm.Engine.VLLM:
        vllm.check_vllm(context, force=force, unused=["kv_tokens"])
        rule = limits.deadline_rule
        settings = vllm.settings_of(
            policy, service, promise, rule, latency_model, emulate, force=force
        )
        command = vllm.serve_command(context, name, (network.host, network.port), settings, rest)
        vllm.become_server(command, api_key or ())
    configure_logging(operator.log_format)
    model = replace(model, model=name)
    try:
        from slosched.engine import server as http  # starlette and uvicorn are an extra
    except ImportError as error:
        raise ExtraMissingError(
            f"serving needs the serve extra ({error}): pip install 'slosched[serve]'"
        ) from error
    if recalibrate and (emulate is not None or latency_model is not None):
        other = "--emulate" if latency_model is None else "--latency-model"
        raise ValueError(f"--recalibrate measures nothing with {other}; leave one of them out")
    chosen = service.with_floors(make_policy(policy))
    door = chosen if isinstance(chosen, Door) else Door(chosen, refuse=Refuse.UNKEEPABLE)
    prefix_cache.check(prefix_cache_eviction)
    prefix_host = options.prefix_host(
        prefix_cache, prefix_host_tokens, prefix_host_writes, kv.block_size
    )
    adapter_paths = loras.paths(model.model, is_emulated=emulate is not None)
    operator.check(is_emulated=emulate is not None)
    ending = EndingAtOnce()
    reporters = operator.reporters(limits.deadline_rule)
    tls, origins = network.tls(), network.origins()
    http.check_can_listen(network.host, network.port)
    slo = promise.slo() or NO_SLO
    limits = limits.on(
        context,
        is_cpu=runs_on_cpu(model) if emulate is None else is_of_cpu(load_model(emulate)),
    )
    adapters = local = background = None
    if emulate is not None:
        device = _emulated(emulate, kv)
    else:
        given = None if latency_model is None else _schedulable(latency_model, force=force)
        local = open_local(
            model if given is None or force else model.as_measured(given.provenance),
            kv,
            limits.limits(),
            num_prefix_host_blocks=prefix_host.num_blocks,
            num_draft_tokens=0 if speculate is None else speculate.num_draft_tokens,
        )
        adapters = http.Adapters(local.loaded.load_adapter)
        adapters.add_all(adapter_paths)  # before a minute is spent on the calibration
        calibrated = partial(calibrated_model, local, limits.limits(), calibrate, anew=recalibrate)
        device = _real(local, given, calibrated, force)
    times = device.server_time
    steps = OnlineModel(with_longer_steps(device.latency_model, times.per_step_s(overlap=overlap)))
    cache = KVCache(
        device.num_blocks,
        kv.block_size,
        kv.num_host_blocks,
        prefix_cache.new_index(
            prefix_cache_eviction, Known(device.num_blocks, kv.block_size, steps)
        ),
        prefix_host,
        device.window_tokens,
    )
    speculation = None if speculate is None else speculate.speculation()
    scheduler = Scheduler(
        door,
        cache,
        replace(limits.limits(), max_loras=loras.max_loras),
        steps,
        speculation,
    )
    loop = Engine(scheduler, device.executor, MonotonicClock(), host_s=times.per_step_host_s)
    rehearse_apart(door)
    if overlap:
        background = InBackground(device.executor)
        loop = OverlappedEngine(scheduler, background, MonotonicClock())
    worker = http.EngineWorker(
        loop, step_limit=http.StepLimit(step_timeout, give_up_after_s=hang_timeout)
    )
    config = http.ServerConfig(
        device.name,
        max_model_len=device.max_model_len,
        default_slo=slo,
        per_request_s=times.per_request_s,
        tiers=service.tiers(),
        on_infeasible=service.on_infeasible,
        api_keys=tuple(api_key or ()),
        admin_api_key=operator.admin_api_key,
        request_timeout_s=network.request_timeout,
        max_requests=network.max_concurrent_requests,
        allowed_origins=origins,
        root_path=network.root_path,
        changes_adapters=loras.allow_lora_updates,
        tenants=service.tenants(),
        logs_requests=operator.log_requests,
        provenance={
            **device.provenance,
            "policy": policy,
            "overlap": "yes" if overlap else "no",
            "limits": limits.described(),
            "kv_capacity_tokens": str(worker.capacity_tokens),
        },
    )

    def announce(url: str) -> None:
        operator.say(
            f"serving {device.name} at {url} under the policy {policy}\n"
            f"{service.described()}"
            f"{promised([slo])}  Deadline rule {limits.deadline_rule}; "
            f"KV cache: {worker.capacity_tokens} tokens; "
            f"a step has at most {limits.described()}; Ctrl-C drains and stops"
        )

    with ending.on(http.ServerStoppedError):
        num_cut_short = http.serve(
            http.build_app(
                worker,
                device.tokenizer,
                config,
                device.grammars,
                adapters,
                None if local is None else operator.control(local, background),
                reporters,
            ),
            worker,
            network.host,
            network.port,
            drain_timeout_s=drain_timeout,
            log_interval_s=operator.log_interval,
            tls=tls,
            log_level=network.uvicorn_log_level,
            on_ready=announce,
        )
    operator.say(
        f"stopped; requests that were cut short, each with an error message: {num_cut_short}"
        if num_cut_short
        else "stopped: every request has had its answer"
    )


@dataclass(frozen=True)
class _Device:
    """The executor of a server, with its latency model, tokenizer and sizes."""

    name: str
    executor: Executor
    latency_model: FittedModel
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    num_blocks: int
    window_tokens: int | None
    """The last tokens that a token sees, if all layers have a sliding window."""
    max_model_len: int
    provenance: Mapping[str, str]
    """The source of the step times: model, device, engine and so on."""
    server_time: ServerTime
    """What this server adds to the latency model's times."""


def _schedulable(latency_model: str, *, force: bool = False) -> FittedModel:
    """Load a latency model by which a policy can schedule."""
    model = load_model(latency_model, force=force)
    check_can_schedule(model)
    return model


def _emulated(name: str, kv: options.KVOptions) -> _Device:
    from slosched.engine.server import ByteTokenizer

    model = _schedulable(name)
    # What the measured server added to each step is the device's; this server has its own times.
    model = with_longer_steps(model, model.server_time.per_step_device_s)
    num_blocks = kv.num_blocks(kv_capacity_tokens(model))
    said = {key: text for key, text in model.provenance.items() if key != SERVER_TIME_ORIGIN}
    return _Device(
        name=name,
        executor=EmulatedExecutor(model),
        latency_model=model,
        tokenizer=ByteTokenizer(),
        grammars=NoGrammars("an emulated device draws no tokens, so that it follows no grammar"),
        num_blocks=num_blocks,
        window_tokens=None,
        max_model_len=num_blocks * kv.block_size,
        provenance={**said, "origin": f"emulated from {name}, nothing was computed"},
        server_time=NO_SERVER_TIME,
    )


def _warn_of_other_settings(given: FittedModel, local: LocalModel) -> None:
    """Print a warning if the latency model was measured with other settings than those here."""
    if others := other_settings(given, local.provenance()):
        console.print(
            f"[bold yellow]warning:[/] the latency model was measured with {escape(others)}: if "
            "steps take another time so, promises that could be kept are refused, and others are "
            "broken.  Serve with the same options as `slosched profile`, or profile with these."
        )


def _real(
    local: LocalModel,
    given: FittedModel | None,
    calibrated: Callable[[], FittedModel],
    force: bool,
) -> _Device:
    if given is not None and not force:
        check_device(given, local.provenance()["device"])
    if given is not None:
        _warn_of_other_settings(given, local)
    model = given or calibrated()
    return _Device(
        name=local.loaded.name,
        executor=local.executor,
        latency_model=model,
        tokenizer=make_tokenizer(local),
        grammars=make_grammars(local),
        num_blocks=local.num_blocks,
        window_tokens=local.loaded.window_tokens,
        max_model_len=local.max_model_len,
        provenance={**local.provenance(), "origin": "measured"},
        server_time=model.server_time,
    )
