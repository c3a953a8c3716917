"""Vidur's side of `peers.py`; it runs in Vidur's Python, which need not have slosched.

    /tmp/vidur/bin/python benchmarks/peer_vidur.py SETUP.json

It times `Simulator.run`, Vidur's event loop, and nothing before or after it.  Vidur's tables of
operator times are filled from SETUP's `step_times`, not from random forests. So the loop looks up
what it always does, and both simulators get the same device.  Made for main at 7d475133.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from vidur.config import SimulationConfig
from vidur.config.config import (
    ClusterConfig,
    MetricsConfig,
    RandomForrestExecutionTimePredictorConfig,
    ReplicaConfig,
    SarathiSchedulerConfig,
    TraceRequestGeneratorConfig,
)
from vidur.entities import Batch
from vidur.execution_time_predictor.sklearn_execution_time_predictor import (
    SklearnExecutionTimePredictor,
)
from vidur.simulator import Simulator

KV_STEP_TOKENS = 64
"""Vidur rounds contexts up to a multiple of this before it looks them up."""
PER_TOKEN_OPERATORS = (
    "attn_pre_proj",
    "attn_rope",
    "attn_kv_cache_save",
    "attn_post_proj",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
)

Tables = dict[str, dict[tuple[int, ...], float]]


def tables_of(step_times: Any, num_layers: int) -> Tables:
    """Return milliseconds of one layer by operator.

    All time that depends on tokens alone is given to one of the operators.
    """
    layers = step_times["layers_ms"] / num_layers
    tables: Tables = {name: {} for name in PER_TOKEN_OPERATORS}
    for number, milliseconds in enumerate(layers.tolist(), 1):
        for name in PER_TOKEN_OPERATORS:
            tables[name][(number,)] = milliseconds if name == "mlp_up_proj" else 0.0
    measured_at = step_times["kv_tokens"]
    contexts = range(0, 2 * int(measured_at[-1]), KV_STEP_TOKENS)
    for name, power in (("attn_decode", 1), ("attn_prefill", 2)):
        table = tables[name] = {}
        for number, row in enumerate(step_times[f"{name}_ms"] / num_layers, 1):
            times = np.interp(contexts, measured_at, row).tolist()
            keys = [(number, kv) if power == 1 else (kv, number**power) for kv in contexts]
            table.update(zip(keys, times, strict=True))
    return tables


def simulator_of(setup: dict[str, Any], folder: str) -> Simulator:
    step_times = np.load(setup["step_times"])
    most_tokens = int(step_times["kv_tokens"][-1])
    skip_training: Any = SklearnExecutionTimePredictor
    skip_training._train_models = lambda _: {}
    skip_training._predict_from_models = lambda predictor: tables_of(
        step_times, predictor._model_config.num_layers
    )
    metrics = setup["write_metrics"]
    config = SimulationConfig(
        log_level="warning",
        cluster_config=ClusterConfig(
            replica_config=ReplicaConfig("meta-llama/Meta-Llama-3-8B", device="a100"),
            replica_scheduler_config=SarathiSchedulerConfig(
                chunk_size=setup["chunk_tokens"],
                batch_size_cap=setup["max_num_seqs"],
                block_size=setup["block_size"],
                num_blocks=setup["num_blocks"],
            ),
        ),
        request_generator_config=TraceRequestGeneratorConfig(
            trace_file=setup["requests"], max_tokens=most_tokens
        ),
        execution_time_predictor_config=RandomForrestExecutionTimePredictorConfig(
            kv_cache_prediction_granularity=KV_STEP_TOKENS,
            prediction_max_tokens_per_request=most_tokens,
            prediction_max_batch_size=setup["max_num_seqs"],
            prediction_max_prefill_chunk_size=setup["chunk_tokens"],
            attention_decode_batching_overhead_fraction=0.0,  # it is in the measured times
            attention_prefill_batching_overhead_fraction=0.0,
        ),
        metrics_config=MetricsConfig(
            write_metrics=metrics,
            enable_chrome_trace=metrics,
            output_dir=folder,
            cache_dir=f"{folder}/cache",
        ),
    )
    simulator = Simulator(config)
    atexit.unregister(simulator._write_output)
    return simulator


def measure(setup: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        simulator = simulator_of(setup, folder)
        requests = [event._request for _, event in simulator._event_queue]
        gc.collect()
        start_s = time.process_time()
        simulator.run()
        cpu_s = time.process_time() - start_s
    latencies = [request.e2e_time for request in requests if request.completed]
    return {
        "version": "main",
        "cpu_s": cpu_s,
        "steps": Batch.generate_id(),  # numbers start at 0
        "completed": len(latencies),
        "mean_e2e_s": float(np.mean(latencies)),
    }


if __name__ == "__main__":
    setup_path = Path(sys.argv[1])
    stdout = os.dup(1)
    os.dup2(2, 1)  # Vidur logs to stdout, which must contain the result alone
    result = measure(json.loads(setup_path.read_text()))
    os.write(stdout, json.dumps(result).encode())
