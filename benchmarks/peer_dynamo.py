"""NVIDIA Dynamo's side of `peers.py`; it runs in a Python that has ai-dynamo-runtime.

    /tmp/dynamo/bin/python benchmarks/peer_dynamo.py SETUP.json

It times `run_mocker_trace_replay`, which `python -m dynamo.replay` calls. The time that the same
call takes to read the trace and stop after a millisecond of simulated time is subtracted.  Made for
1.3.1 (which has `MockEngineArgs`) and 1.6.1 (which does not).
"""

from __future__ import annotations

import csv
import importlib.metadata
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dynamo import _core


def write_mooncake(requests: str, path: Path, block_size: int) -> None:
    """Write the trace in the format that Dynamo reads; no two requests share a block."""
    fresh = itertools.count()
    with Path(requests).open(newline="") as source, path.open("w") as target:
        for row in csv.DictReader(source):
            prompt = int(row["num_prefill_tokens"])
            line = {
                "timestamp": 1e3 * float(row["arrived_at"]),
                "input_length": prompt,
                "output_length": int(row["num_decode_tokens"]),
                "hash_ids": list(itertools.islice(fresh, -(-prompt // block_size))),
            }
            target.write(json.dumps(line) + "\n")


def engine_of(setup: dict[str, Any]) -> object:
    """Return the replica's settings; its step times are interpolated in SETUP's tables."""
    replica = {
        "block_size": setup["block_size"],
        "num_gpu_blocks": setup["num_blocks"],
        "max_num_seqs": setup["max_num_seqs"],
        "max_num_batched_tokens": setup["chunk_tokens"],
        "enable_prefix_caching": True,  # Dynamo's default, and no slower than without
    }
    if hasattr(_core, "MockEngineArgs"):
        return _core.MockEngineArgs.from_json(
            json.dumps(replica | {"planner_profile_data": setup["step_times"]})
        )
    times = {"path": setup["step_times"]}
    timing = {"type": "external", "provider": "dynamo_profile", "config": times}
    return {"engine": replica | {"timing_model": timing}}


def replay(trace: Path, setup: dict[str, Any], **limits: float) -> tuple[float, dict[str, Any]]:
    """Run one replay, and return its CPU seconds and its report."""
    engine = engine_of(setup)
    start_s = time.process_time()
    report = _core.run_mocker_trace_replay(
        [trace], extra_engine_args=engine, trace_block_size=setup["block_size"], **limits
    )
    return time.process_time() - start_s, getattr(report, "summary", report)


def measure(setup: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        write_mooncake(setup["requests"], trace, setup["block_size"])
        reading_s, _ = replay(trace, setup, max_sim_time_ms=1.0)
        whole_s, report = replay(trace, setup)
    return {
        "version": importlib.metadata.version("ai-dynamo-runtime"),
        "cpu_s": whole_s - reading_s,
        "steps": None,  # it does not say
        "completed": report["completed_requests"],
        "mean_e2e_s": report["mean_e2e_latency_ms"] / 1e3,
    }


if __name__ == "__main__":
    result = measure(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.write("\n" + json.dumps(result))
