"""slosched's own C++ kernel (`cpp_kernel.cpp`) for CPUs, compiled when it is first used."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from slosched.engine.torch.attention.backend import (
    AttentionPlan,
    BackendUnavailableError,
    KernelLimits,
    Scoring,
)
from slosched.engine.torch.attention.batch import PagedBatch
from slosched.engine.torch.embedded import default_cache_dir

NAME = "cpp"
INSTALL = "apt-get install g++ ninja-build"
_SOURCE = Path(__file__).with_name("cpp_kernel.cpp")
_FLAGS = ("-O3", "-fopenmp")
_INSTRUCTIONS = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
"""The instructions for which the kernel is compiled, by what torch calls them."""
_SEES_ALL = 2**62
"""A window that is longer than every context."""

logger = logging.getLogger(__name__)


def load(device: torch.device) -> CppBackend:
    """Return the backend, compiled if it has to be, or raise BackendUnavailableError."""
    if device.type != "cpu":
        raise BackendUnavailableError(NAME, f"is for CPUs, and the device is {device}")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _INSTRUCTIONS:
        raise BackendUnavailableError(NAME, "needs a processor with AVX2 or AVX-512")
    return CppBackend(ctypes.CDLL(str(_library(capability))))


class CppBackend:
    """A backend of our own kernel for any model and block size."""

    name = NAME
    limits = KernelLimits(dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}))

    def __init__(self, library: ctypes.CDLL) -> None:
        self._kernels = {
            torch.float32: library.attend_float32,
            torch.bfloat16: library.attend_bfloat16,
            torch.float16: library.attend_float16,
        }
        for kernel in self._kernels.values():
            kernel.argtypes, kernel.restype = (ctypes.POINTER(_Call),), None

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        return _Plan(self._kernels, batch)


class _Plan:
    def __init__(self, kernels: dict[torch.dtype, ctypes._NamedFuncPointer], batch: PagedBatch):
        self._kernels = kernels
        self._batch = batch

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> Tensor:
        _check_layout(query, k_cache, v_cache)
        batch = self._batch
        out = torch.empty(query.shape, dtype=query.dtype)
        call = _Call(
            out=out.data_ptr(),
            query=query.data_ptr(),
            keys=k_cache.data_ptr(),
            values=v_cache.data_ptr(),
            query_starts=batch.query_starts.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            num_sequences=len(batch.num_new_tokens),
            most_blocks=batch.block_tables.stride(0),
            block_size=batch.block_size,
            num_heads=query.shape[1],
            num_kv_heads=k_cache.shape[2],
            head_dim=query.shape[2],
            query_token_stride=query.stride(0),
            query_head_stride=query.stride(1),
            window_tokens=scoring.window or _SEES_ALL,
            scale=scoring.scale,
        )
        self._kernels[query.dtype](ctypes.byref(call))
        return out


class _Call(ctypes.Structure):
    """The structure `Call` of cpp_kernel.cpp."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int64),
        ("most_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("query_token_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("window_tokens", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


def _check_layout(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ValueError unless the kernel, which gets plain addresses, can read these tensors."""
    caches = (k_cache, v_cache)
    if query.stride(2) != 1 or not all(cache.is_contiguous() for cache in caches):
        raise ValueError("the C++ kernel needs caches and heads whose numbers follow each other")
    if any(cache.dtype != query.dtype for cache in caches):
        raise ValueError(f"queries in {query.dtype} need keys and values of the same type")


def _library(capability: str) -> Path:
    """Return the compiled kernel in the user's cache; compile it if it is not there.

    Safe if several processes call it at once.  Raises BackendUnavailableError if it cannot be
    compiled.
    """
    flags = (
        *_FLAGS,
        *_INSTRUCTIONS[capability],
        f"-DCPU_CAPABILITY={capability}",
        f"-DCPU_CAPABILITY_{capability}",
    )
    made_of = (torch.__version__, *flags, _SOURCE.read_text())
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    directory = default_cache_dir() / "kernels" / f"attention-{digest}"
    library = directory / "attention.so"
    if library.exists():
        return library
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{directory}.lock"):
            if not library.exists():
                _compile(directory, flags)
    except (OSError, RuntimeError) as error:
        raise BackendUnavailableError(
            NAME, f"could not be compiled ({error}): {INSTALL}"
        ) from error
    return library


def _compile(directory: Path, flags: tuple[str, ...]) -> None:
    # It takes a third of a second to import, and is needed once.
    from torch.utils.cpp_extension import load as compile_and_load

    logger.info("compiling the C++ kernel for attention to %s (once)", directory)
    with tempfile.TemporaryDirectory(prefix="attention-", dir=directory.parent) as scratch:
        built = Path(scratch) / "built"
        built.mkdir()
        compile_and_load(
            "attention",
            [str(_SOURCE)],
            extra_cflags=list(flags),
            extra_ldflags=["-fopenmp"],
            build_directory=str(built),
            is_python_module=False,
        )
        built.rename(directory)
