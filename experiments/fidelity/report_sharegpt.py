"""The part of docs/fidelity.md on the two runs of which every request is known."""

from __future__ import annotations

import pandas as pd

from experiments.fidelity import sharegpt
from experiments.markdown import table


def sharegpt_runs(requests: pd.DataFrame) -> str:
    rows = []
    records = requests.to_dict("records")
    of = {(str(r["run"]), str(r["latency_model"])): r for r in records}
    for run in dict.fromkeys(str(r["run"]) for r in records):
        for latency, name in (
            ("ttft_mean_s", "mean TTFT"),
            ("tpot_mean_s", "mean TPOT"),
            ("e2e_mean_s", "mean E2E"),
        ):
            measured = float(of[run, sharegpt.BUNDLED][latency])
            scale, unit = (1000, "ms") if latency == "tpot_mean_s" else (1, "s")
            cells = [f"{scale * measured:.2f} {unit}"]
            for model in (sharegpt.BUNDLED, sharegpt.UNEQUAL):
                simulated = float(of[run, model][f"{latency}_sim"])
                error = 100 * (simulated / measured - 1)
                cells.append(f"{scale * simulated:.2f} {unit} ({error:+.1f} %)")
            rows.append((run, name, *cells))
    heads = ("run", "", "measured", "bundled model", "fitted to unequal contexts, too")
    return (
        "## vLLM 0.19 on RTX GPUs\n\n"
        "300 ShareGPT requests at 10/s, which both GPUs cannot serve at that rate: the queue "
        "grows. LLMServingSim's authors measured the runs, and on the same GPUs the kernels from "
        "which the bundled latency models `rtx4090/llama-3.1-8b` and `rtxpro6000/llama-3.1-8b` are "
        "made. Nothing is fitted to the runs, and no server time is added (the client is in the "
        "engine's process).\n\n"
        f"{table(heads, rows, 2)}\n\n"
        "On the RTX 4090 the KV cache is too small, and requests are preempted. Since a preempted "
        "request finds the blocks of its prompt again, the prefix cache decides here, although "
        "only 8 % of the prompts' tokens are shared: without it the mean TTFT is off by 4.2 %.\n\n"
        f"{_RTX_PRO}"
    )


_RTX_PRO = (
    "**Unequal contexts** are what the bundled model of the RTX PRO 6000 lacks. It is fitted to "
    "decodes whose contexts are all equally long. FlashAttention-2 splits the keys of a few "
    "decodes over the processors, but not those of many: from 1.6 times as many decodes and KV "
    "heads as processors (38 decodes here, 26 on the RTX 4090) one block of threads walks a whole "
    "context, and the step waits for the longest. LLMServingSim measured that, too: 64 and 128 "
    "decodes of which one is four times as long as the others take 24 and 10 % longer than equal "
    "ones of the same sum. In this run 128 requests decode, with contexts of 1,100 tokens in the "
    "mean and of 4,000 at most. With the measured times of equal decodes in the model's place, "
    "mean TTFT is off by -10.7 % and mean TPOT by -4.3 %; with those of unequal ones by -4.7 and "
    "-1.4 % "
    "(`python -m benchmarks.rtx_decodes PERF`). The table's last column has a latency model that "
    "was fitted to these measurements, too ([how](latency-model.md#unequal-contexts)). The "
    "measured times leave about as much, so "
    "that the rest is not in the decodes' kernel: gaps between kernels and the server's own time "
    "are in no table. On the RTX 4090 the steps come out too long by the same correction, and the "
    "run is further off than with the bundled model: the kernels were measured with one or a few "
    "contexts four times as long as all others, and the contexts of a server lie between. The "
    "model is not bundled, as results of the arena were played with the bundled ones."
)
