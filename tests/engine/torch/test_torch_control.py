"""Changing the weights, flushing the prefix cache and profiling a real model while requests run."""

from __future__ import annotations

import gzip
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from slosched.core import Limits, OperationError, PreemptionMode, Request, SamplingParams
from slosched.engine.background import InBackground
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.overlap import OverlappedEngine
from slosched.engine.server.model_control import UpdateMode, flush, install
from slosched.engine.torch import LoadedModel, TorchControl, TorchExecutor, load_model
from slosched.kv import KVCache, PrefixCaching, PrefixHost
from slosched.policy import FCFS
from slosched.scheduler import Scheduler

NUM_BLOCKS, NUM_HOST, BLOCK = 24, 32, 4
PROMPTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15, 20 + i] for i in range(6)]
NUM_OUTPUT = 12


def load(seed: int) -> LoadedModel:
    return load_model("tiny-random", dtype="float32", device="cpu", seed=seed, num_threads=1)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadedModel]:
    path, model = tmp_path_factory.mktemp("other"), load(seed=5)
    model.model.save_pretrained(path)
    return path, model


def engine_of(
    model: LoadedModel, kind: PrefixCaching, *, overlap: bool = False, tier: int = 0
) -> Engine:
    kv = KVCache(NUM_BLOCKS, BLOCK, NUM_HOST, kind.new_index(), PrefixHost(tier))
    limits = Limits(32, 8, preemption_mode=PreemptionMode.SWAP)
    executor = TorchExecutor(
        model, num_blocks=NUM_BLOCKS, block_size=BLOCK, num_host_blocks=NUM_HOST + tier
    )
    scheduler, clock = Scheduler(FCFS(), kv, limits), MonotonicClock()
    if overlap:
        return OverlappedEngine(scheduler, InBackground(executor), clock)
    return Engine(scheduler, executor, clock)


def run(engine: Engine, between: Callable[[], object], after: int = 6) -> list[Request]:
    """Run all prompts to their ends, with a call of `between` after some steps."""
    sampling = SamplingParams(ignore_eos=True)
    requests = [
        Request(f"r{i}", 0.0, len(ids), NUM_OUTPUT, prompt_token_ids=ids, sampling=sampling)
        for i, ids in enumerate(PROMPTS)
    ]
    for request in requests:
        engine.scheduler.add_request(request)
    for place in itertools.count():
        if not engine.has_work:
            break
        engine.step()
        if place == after:
            engine.settle()
            between()
            engine.scheduler.kv.check()
    kv = engine.scheduler.kv
    kv.check()
    assert kv.num_free_blocks == kv.num_blocks
    assert kv.num_free_host_blocks == NUM_HOST
    return requests


def greedy(model: LoadedModel, ids: list[int], n: int) -> list[int]:
    """Return `ids` with `n` more tokens, computed with transformers' own attention."""
    config = model.model.config
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    plain.load_state_dict(model.model.state_dict())
    for _ in range(n):
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([ids])).logits[0, -1]
        ids = [*ids, int(logits.argmax())]
    return ids


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("kind", "tier"),
    [
        (PrefixCaching.OFF, 0),
        (PrefixCaching.HASH, 0),
        (PrefixCaching.MERGED, 0),
        (PrefixCaching.RADIX, 0),
        (PrefixCaching.RADIX, 16),
    ],
)
def test_a_flush_in_mid_generation_changes_no_token(
    kind: PrefixCaching, tier: int, overlap: bool
) -> None:
    model = load(seed=0)
    expected = [r.output_token_ids for r in run(engine_of(model, PrefixCaching.OFF), lambda: None)]
    engine = engine_of(model, kind, overlap=overlap, tier=tier)
    held: list[int] = []
    requests = run(engine, lambda: held.append(flush(engine, retracts=True)))
    assert held == [0]
    assert [r.output_token_ids for r in requests] == expected
    assert any(r.num_preemptions for r in requests)


@pytest.mark.parametrize("kind", [PrefixCaching.OFF, PrefixCaching.HASH, PrefixCaching.RADIX])
def test_retracted_requests_go_on_as_if_the_new_weights_had_read_them(
    kind: PrefixCaching, other_weights: tuple[Path, LoadedModel]
) -> None:
    path, other = other_weights
    model = load(seed=0)
    engine, control = engine_of(model, kind), TorchControl(model)
    before: dict[str, list[int]] = {}

    def change() -> None:
        for request in engine.scheduler.unfinished():
            before[request.request_id] = request.output_token_ids.copy()
        weights = control.read_weights(str(path))
        num = install(engine, control, weights, UpdateMode.RETRACT, flushes=True)
        assert num == len(before)

    requests = run(engine, change)
    assert len(before) == len(requests)
    assert sum(map(bool, before.values())) > 1
    for request, ids in zip(requests, PROMPTS, strict=True):
        known = [*ids, *before[request.request_id]]
        num_left = NUM_OUTPUT + len(ids) - len(known)
        assert greedy(other, known, num_left) == [*ids, *request.output_token_ids]


@pytest.mark.parametrize("mode", [UpdateMode.IN_PLACE, UpdateMode.ABORT])
def test_in_place_all_go_on_and_with_abort_all_end(
    mode: UpdateMode, other_weights: tuple[Path, LoadedModel]
) -> None:
    model = load(seed=0)
    engine, control = engine_of(model, PrefixCaching.HASH), TorchControl(model)
    weights = control.read_weights(str(other_weights[0]))
    if mode is UpdateMode.IN_PLACE:
        refused = engine_of(model, PrefixCaching.HASH)

        def refuse() -> None:
            with pytest.raises(OperationError, match="mode=retract"):
                install(refused, control, weights, mode, flushes=True)

        run(refused, refuse)
    flushes = mode is UpdateMode.ABORT
    requests = run(engine, lambda: install(engine, control, weights, mode, flushes=flushes))
    lengths = {r.num_output_tokens for r in requests if r.end_reason == "length"}
    assert lengths == ({NUM_OUTPUT} if mode is UpdateMode.IN_PLACE else set())


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    model = load(seed=0)
    control = TorchControl(model)
    with pytest.raises(OperationError, match="holds no config"):
        control.read_weights(str(tmp_path))
    config = type(model.model.config)(**{**model.model.config.to_dict(), "intermediate_size": 8})
    type(model.model)(config).save_pretrained(tmp_path)
    with pytest.raises(OperationError, match="another architecture"):
        control.read_weights(str(tmp_path))
    model.model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = model.model.state_dict()
    name = next(name for name in weights if "mlp" in name)
    save_file({key: value for key, value in weights.items() if key != name}, file)
    with pytest.raises(OperationError, match=f"lack 1 of the model's weights.*{re.escape(name)}"):
        control.read_weights(str(tmp_path))
    file.write_bytes(b"no weights")
    with pytest.raises(OperationError, match="cannot be read"):
        control.read_weights(str(tmp_path))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_profile_has_the_operations_of_the_steps(tmp_path: Path, overlap: bool) -> None:
    model = load(seed=0)
    executor = TorchExecutor(model, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    background = InBackground(executor)
    on_device = background.call if overlap else (lambda function: function())
    control = TorchControl(model, tmp_path / "profiles", on_device)
    scheduler = Scheduler(FCFS(), KVCache(NUM_BLOCKS, BLOCK))
    engine = Engine(scheduler, background if overlap else executor, MonotonicClock())
    scheduler.add_request(Request("r", 0.0, 3, 2, prompt_token_ids=[1, 2, 3]))
    control.start_profile()
    with pytest.raises(OperationError, match="being recorded"):
        control.start_profile()
    engine.step()
    control.stop_profile()
    with pytest.raises(OperationError, match="no profile"):
        control.stop_profile()
    with gzip.open(control.write_profile(), "rt") as trace:
        assert "aten::embedding" in trace.read()


def test_a_server_without_a_directory_records_no_profile() -> None:
    with pytest.raises(OperationError, match="--torch-profiler-dir"):
        TorchControl(load(seed=0)).start_profile()
