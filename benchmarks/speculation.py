"""Prompt lookup on SmolLM2-135M and a CPU: `python -m benchmarks.speculation`.

One request whose text repeats itself is answered in turns with and without draft tokens.  Times are
the processor's, so that other programs on the machine count little.  The tokens have to be equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from slosched.core import Limits, Request, SamplingParams
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.torch import LoadedModel, TorchExecutor, load_model
from slosched.kv import KVCache
from slosched.policy import FCFS
from slosched.scheduler import PromptLookup, Scheduler, Speculation

TEXT = (
    "Copy the list.\n"
    "red apple, green pear, yellow lemon, blue plum, brown nut, white rice, black tea\n"
    "red apple, green pear, yellow lemon, blue plum, brown nut, white rice, black tea\n"
    "red apple,"
)
NUM_OUTPUT_TOKENS = 96
NUM_TURNS = 5


def answer(
    model: LoadedModel, prompt: list[int], num_drafts: int
) -> tuple[float, list[int], int, Speculation | None]:
    """Return the processor's seconds after the first token, the tokens, the steps, and the drafts.

    A step may verify `num_drafts` draft tokens; at 0 there is no speculation.
    """
    executor = TorchExecutor(model, num_blocks=64)
    speculation = Speculation(PromptLookup(), num_drafts) if num_drafts else None
    scheduler = Scheduler(FCFS(), KVCache(64), Limits(), None, speculation)
    engine = Engine(scheduler, executor, MonotonicClock())
    sampling = SamplingParams(ignore_eos=True)
    request = Request(
        *("r", 0.0, len(prompt), NUM_OUTPUT_TOKENS), prompt_token_ids=prompt, sampling=sampling
    )
    scheduler.add_request(request)
    engine.step()
    start_s, num_steps = time.process_time(), 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    return time.process_time() - start_s, request.output_token_ids, num_steps, speculation


def main() -> None:
    model = load_model("smollm2-135m", device="cpu", dtype="float32", num_threads=1)
    assert model.tokenizer is not None
    prompt: list[int] = model.tokenizer(TEXT).input_ids
    answer(model, prompt, 4)  # warms up
    for num_drafts in (4, 8):
        ratios = []
        for _ in range(NUM_TURNS):
            plain_s, plain, num_plain, _ = answer(model, prompt, 0)
            took_s, tokens, num_steps, speculation = answer(model, prompt, num_drafts)
            assert tokens == plain, "drafts changed the tokens"
            assert speculation is not None
            ratios.append(plain_s / took_s)
        sys.stdout.write(
            f"up to {num_drafts} drafts: {statistics.median(ratios):.2f} times as fast (of "
            f"{NUM_TURNS} turns {min(ratios):.2f} to {max(ratios):.2f}), {num_steps} steps instead "
            f"of {num_plain}, {speculation.num_accepted} of {speculation.num_drafted} drafts "
            f"accepted; the last turn took {took_s:.2f} instead of {plain_s:.2f} CPU seconds\n"
        )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()  # for --help
    main()
