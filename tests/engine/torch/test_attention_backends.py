"""All attention backends compute the same: causal attention of mixed batches over a paged cache."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle, product
from pathlib import Path
from shutil import which

import documented_kernels as documented
import pytest
import torch

from slosched.engine.torch import KVGeometry, TorchExecutor, load_model
from slosched.engine.torch.attention import (
    BACKENDS,
    AttentionBackend,
    BackendUnavailableError,
    KernelLimits,
    Scoring,
    choose_backend,
    statuses,
)
from slosched.engine.torch.attention.flash_attn import FlashAttn
from slosched.engine.torch.attention.flash_attn_3 import FlashAttn3
from slosched.engine.torch.attention.flash_attn_4 import FlashAttn4
from slosched.engine.torch.attention.sdpa import SdpaBackend
from slosched.engine.torch.attention.torch_varlen import TorchVarlen
from slosched.engine.torch.attention.vllm_flash_attn import VLLMFlashAttn
from slosched.engine.torch.conformance import (
    LARGEST_ERROR,
    MIXES,
    WINDOWS,
    Case,
    Shape,
    make_case,
    relative_error,
)

torch.set_num_threads(1)

CPU = torch.device("cpu")
GEOMETRY = KVGeometry(1, 2, 16, torch.float32)

DOCUMENTED: list[AttentionBackend] = [
    FlashAttn(documented.flash_attn_varlen_func, documented.flash_attn_with_kvcache),
    FlashAttn3(documented.flash_attn_3_with_kvcache),
    FlashAttn4(documented.flash_attn_4_varlen_func),
    VLLMFlashAttn(documented.vllm_flash_attn_varlen_func, fa_version=3),
    TorchVarlen(documented.varlen_attn),
]
"""Backends whose kernels need a GPU, around what the documentation says of these kernels."""


def check(backend: AttentionBackend, case: Case, window: int | None) -> None:
    """Compare a backend's attention with its definition."""
    assert relative_error(backend, case, window) <= LARGEST_ERROR[case.query.dtype]


def loaded(name: str, device: str) -> AttentionBackend:
    """Return a backend as a server would load it; skip the test where it cannot run."""
    if name == "cpp" and device == "cpu" and not (which("c++") and which("ninja")):
        pytest.skip("the C++ kernel needs a compiler: apt-get install g++ ninja-build")
    if name == "triton" and find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install triton")
    geometry = KVGeometry(1, 2, 16, torch.bfloat16)
    try:
        return choose_backend(name, torch.device(device), geometry, block_size=256)
    except BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sdpa(mix: str, window: int | None, dtype: torch.dtype) -> None:
    check(SdpaBackend(), make_case(MIXES[mix], dtype), window)


@pytest.mark.parametrize("window", [None, 6])
def test_sdpa_with_decodes_that_are_too_long_for_one_call(window: int | None) -> None:
    case = make_case(Shape(tokens=((1, 1700), (1, 1100), (5, 9), (1, 1300), (1, 4000))))
    check(SdpaBackend(), case, window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_our_cpp_kernel(mix: str, window: int | None, dtype: torch.dtype) -> None:
    check(loaded("cpp", "cpu"), make_case(MIXES[mix], dtype), window)


@pytest.mark.parametrize("block_size", [1, 5])
def test_our_cpp_kernel_takes_any_block_size(block_size: int) -> None:
    shape = Shape(block_size=block_size, tokens=((1, 9), (4, 3), (1, 150)))
    check(loaded("cpp", "cpu"), make_case(shape), None)


@pytest.mark.parametrize("window", [None, 90])
def test_our_cpp_kernel_with_tiles_and_contexts_of_several_pieces(window: int | None) -> None:
    shape = Shape(9, 3, 64, tokens=((1, 700), (150, 20), (1, 127), (70, 400)))
    backend = loaded("cpp", "cpu")
    check(backend, make_case(shape), window)
    check(backend, make_case(replace(shape, num_kv_heads=1)), window)


def test_our_cpp_kernel_on_several_threads_computes_the_same() -> None:
    case = make_case(Shape(tokens=((1, 90), (40, 100), (1, 300))))
    plan = loaded("cpp", "cpu").plan(case.batch)
    alone = plan.attend(case.query, case.k_cache, case.v_cache, Scoring(0.3, None))
    torch.set_num_threads(2)
    try:
        both = plan.attend(case.query, case.k_cache, case.v_cache, Scoring(0.3, None))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(both, alone)


def test_our_cpp_kernel_computes_a_token_alike_in_a_chunk_and_alone() -> None:
    backend, shape = loaded("cpp", "cpu"), Shape(tokens=((1, 100),))
    alone, chunk = (
        make_case(replace(shape, tokens=tokens)) for tokens in (((1, 100),), ((2, 99),))
    )
    chunk.query[1] = alone.query[0]
    attend = (
        backend.plan(case.batch).attend(case.query, case.k_cache, case.v_cache, Scoring(0.3, None))
        for case in (alone, replace(chunk, k_cache=alone.k_cache, v_cache=alone.v_cache))
    )
    of_alone, of_chunk = attend
    assert torch.equal(of_chunk[1], of_alone[0])


def test_our_cpp_kernel_refuses_tensors_that_it_would_read_wrongly() -> None:
    case = make_case(Shape())
    plan = loaded("cpp", "cpu").plan(case.batch)
    keys, values, scoring = case.k_cache, case.v_cache, Scoring(0.3, None)
    with pytest.raises(ValueError, match="follow each other"):
        plan.attend(case.query, keys.transpose(2, 3), values, scoring)
    with pytest.raises(ValueError, match="float32 need keys and values of the same type"):
        plan.attend(case.query, keys.bfloat16(), values.bfloat16(), scoring)


@pytest.mark.parametrize(("mix", "window"), zip(MIXES, cycle((None, 6)), strict=False))
def test_our_triton_kernel(mix: str, window: int | None) -> None:
    check(loaded("triton", "cpu"), make_case(MIXES[mix]), window)


def test_our_triton_kernel_in_half_precision() -> None:
    """Triton's interpreter computes products of bfloat16 wrongly, so this one is for float16."""
    check(loaded("triton", "cpu"), make_case(MIXES["mixed"], torch.float16), 6)


@pytest.mark.parametrize("block_size", [1, 5])
def test_our_triton_kernel_takes_any_block_size(block_size: int) -> None:
    shape = Shape(block_size=block_size, tokens=((1, 9), (4, 3)))
    check(loaded("triton", "cpu"), make_case(shape), None)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("backend", DOCUMENTED, ids=lambda backend: backend.name)
def test_the_arguments_for_kernels_that_need_a_gpu(
    backend: AttentionBackend, mix: str, window: int | None
) -> None:
    shape = MIXES[mix]
    if shape.block_size % backend.limits.block_multiple:
        shape = replace(shape, block_size=backend.limits.block_multiple)
    check(backend, make_case(shape, torch.bfloat16), window)


@pytest.mark.parametrize("name", BACKENDS)
def test_on_a_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    backend = loaded(name, "cuda")
    for shape, window in product(MIXES.values(), WINDOWS):
        if shape.block_size % backend.limits.block_multiple == 0:
            check(backend, make_case(shape, torch.bfloat16, "cuda"), window)


def test_what_is_documented_for_torch_is_what_torch_has() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    real, ours = (
        inspect.signature(f).parameters for f in (varlen.varlen_attn, documented.varlen_attn)
    )
    if "block_table" not in real:
        pytest.skip(f"torch {torch.__version__} does not page")
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in real.values()
    ]


def test_on_a_cpu_auto_is_our_cpp_kernel() -> None:
    assert choose_backend("auto", CPU, GEOMETRY, 16).name == loaded("cpp", "cpu").name


def test_without_a_compiler_auto_is_sdpa_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLOSCHED_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_backend("auto", CPU, GEOMETRY, 16).name == "sdpa"
    status = next(status for status in statuses(CPU) if status.name == "cpp")
    assert "could not be compiled" in status.reason
    assert status.install == "apt-get install g++ ninja-build"


def test_a_model_over_our_triton_kernel_has_the_logits_of_eager_attention() -> None:
    loaded("triton", "cpu")
    # `load_model` compares the logits, and raises an error if they differ.
    model = load_model("tiny-random", device="cpu", dtype="float32", attention="triton")
    assert model.backend.name == "triton"


def test_a_backend_that_cannot_run_says_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(BackendUnavailableError, match=r"'flash-attn' needs an NVIDIA GPU"):
        load_model("tiny-random", device="cpu", dtype="float32", attention="flash-attn")
    with pytest.raises(ValueError, match=r"'flash_atn' \(did you mean flash-attn\?\)"):
        load_model("tiny-random", device="cpu", dtype="float32", attention="flash_atn")


def test_every_backend_has_a_status() -> None:
    found = statuses(CPU)
    assert len(found) == len(BACKENDS)
    assert (found[-1].name, found[-1].reason) == ("sdpa", "")
    assert all(status.reason for status in found if status.name.startswith(("flash", "vllm")))


@pytest.mark.parametrize(
    ("limits", "geometry", "block_size", "reason"),
    [
        (KernelLimits(256), KVGeometry(1, 2, 64, torch.bfloat16), 16, "--block-size 256"),
        (FlashAttn3.limits, KVGeometry(1, 2, 64, torch.float32), 16, "not in float32.*--dtype"),
        (FlashAttn3.limits, KVGeometry(1, 2, 288, torch.bfloat16), 16, "up to 256.*have 288"),
        (FlashAttn3.limits, KVGeometry(1, 2, 60, torch.bfloat16), 16, "multiple of 8.*have 60"),
    ],
)
def test_what_a_kernel_does_not_take_is_refused(
    limits: KernelLimits, geometry: KVGeometry, block_size: int, reason: str
) -> None:
    with pytest.raises(BackendUnavailableError, match=f"'x'.*{reason}"):
        limits.check("x", geometry, block_size)
    limits.check("x", KVGeometry(1, 2, 64, torch.bfloat16), 256)


def test_an_executor_refuses_a_block_size_that_its_backend_does_not_take() -> None:
    class OfLargeBlocks(SdpaBackend):
        limits = KernelLimits(block_multiple=256)

    model = load_model("tiny-random", device="cpu", dtype="float32")
    model = replace(model, backend=OfLargeBlocks())
    with pytest.raises(BackendUnavailableError, match="multiple of 256, not 16"):
        TorchExecutor(model, num_blocks=4, block_size=16)
    TorchExecutor(model, num_blocks=4, block_size=256)
