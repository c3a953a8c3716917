"""Our Triton kernel compiles to machine code for GPUs that this machine does not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SHARED_MEMORY_BYTES = 99 * 1024
"""The shared memory that a program may have on the smallest of these GPUs, 8.6 and 8.9."""
PROGRAM = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from slosched.engine.torch.attention.triton_kernel import _paged_attention

dtype, precision, tile_rows, tile_keys = json.loads(sys.argv[1])
constants = dict(
    block_size=16, group_size=4, head_dim=128, tile_dims=128, tile_rows=tile_rows,
    tile_keys=tile_keys, precision=precision,
)
types = dict.fromkeys(_paged_attention.arg_names, "i32") | dict(scale="fp32")
types |= dict.fromkeys(("out", "query", "k_cache", "v_cache"), "*" + dtype)
types |= dict.fromkeys(("query_starts", "context_lens", "block_tables"), "*i32")
types |= dict.fromkeys(constants, "constexpr")
for capability in (80, 90, 100):
    source = ASTSource(fn=_paged_attention, signature=types, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"]
    print(made.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [("bf16", "tf32", 64, 64), ("fp32", "ieee", 32, 32)])
def test_the_kernel_compiles_and_its_tiles_fit_into_shared_memory(
    tiles: tuple[str, str, int, int], tmp_path: Path
) -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(tiles)]
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    shared = [int(line) for line in run.stdout.split()]
    assert len(shared) == 3
    assert max(shared) <= SHARED_MEMORY_BYTES
