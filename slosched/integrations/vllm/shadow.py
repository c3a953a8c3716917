"""Shadow mode: vLLM decides as ever, and what happens is written down for `slosched shadow report`.

A latency model, if the settings name one, lets the policy plan beside vLLM.  Its plans are not
carried out; the requests that it would have rejected are written down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from slosched.core import BatchShape, Policy, Request
from slosched.integrations.vllm.link import Link
from slosched.integrations.vllm.record import recorder, until_it_fails
from slosched.integrations.vllm.settings import Settings
from slosched.integrations.vllm.truth import Fallback
from slosched.policy.spec import make_policy
from slosched.replay.shadow import STEPS, ServerFacts, ShadowFiles
from slosched.simulator.apart import rehearse_apart

logger = logging.getLogger("vllm.slosched")

_HASH_BYTES = 7
"""Bytes of a block's hash that are kept: they fit into a signed 64-bit integer."""


class Shadow(Link):
    """The link that leaves every decision to vLLM and changes nothing."""

    def __init__(
        self, host: Any, settings: Settings, device: str, facts: dict[str, str], engine: int = 0
    ) -> None:
        """Begin a folder of this run; `facts` describe the measured steps, `engine` is a number."""
        make_policy(settings.policy)  # a misspelt name is an error before anything is written
        folder = _new_folder(settings.shadow_folder, engine)
        record = recorder(replace(settings, record=str(folder / STEPS)), facts)
        super().__init__(host, settings, device, record)
        self._policy: Policy | None = None
        if self._model is not None:
            self._policy = settings.make_policy(self._model, self._limits)
            rehearse_apart(self._policy)
        self._rejected: set[str] = set()
        files = ShadowFiles(
            folder,
            ServerFacts(
                policy=settings.policy,
                max_num_batched_tokens=self._limits.max_num_batched_tokens,
                max_num_seqs=self._limits.max_num_seqs,
                block_size=self._kv.block_size,
                num_blocks=self._kv.num_blocks,
                caches_prefixes=self._kv.caches_prefixes,
                plans_ahead=bool(host.vllm_config.scheduler_config.async_scheduling),
                deadline_rule=settings.deadline_rule,
                max_chunk_tokens=self._limits.max_chunk_tokens,
                num_watermark_blocks=self._limits.num_watermark_blocks,
            ),
        )
        self._note_end = until_it_fails(files.note_end, folder)
        self._note_rejection = until_it_fails(files.note_rejection, folder)
        self._mirror.on_end = self._ended
        logger.info(
            "slosched: shadow mode, vLLM decides; `slosched shadow report %s` says what %s would "
            "have gained",
            folder,
            settings.policy,
        )

    def _run(
        self, begins_s: float, vllm_schedule: Callable[[], Any]
    ) -> tuple[Any, BatchShape | None]:
        if self._policy is not None:
            self._ask(self._policy, begins_s)
        return vllm_schedule(), None

    def _ask(self, policy: Policy, begins_s: float) -> None:
        """Note which requests the policy would reject now, each request once."""
        try:
            plan = policy.schedule(self._mirror.view(begins_s, self._model))
        # Whatever error a policy raises, vLLM must go on.
        except Exception as error:
            self.truth.note_fallback(Fallback.RAISED, error)
            return
        for request_id, reason in plan.rejected.items():
            if request_id not in self._rejected:
                self._rejected.add(request_id)
                self.truth.rejections[reason] += 1  # none on /metrics: these requests are served
                self._note_rejection(request_id, reason)

    def _ended(self, ours: Request, theirs: Any) -> None:
        self._rejected.discard(ours.request_id)
        hashes: tuple[int, ...] = ()
        if self._kv.caches_prefixes:
            whole = theirs.block_hashes[: ours.num_prompt_tokens // self._kv.block_size]
            hashes = tuple(int.from_bytes(each[:_HASH_BYTES]) for each in whole)
        # All answers of a session have its id.
        more = f"@{ours.arrival_s}" if theirs.resumable else ""
        self._note_end(ours, hashes, ours.request_id + more)


def _new_folder(parent: Path, engine: int) -> Path:
    """Make a folder for this start of this engine.

    Servers that share a disk may start in the same second; each gets a folder of its own.
    """
    name = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
    if engine > 0:
        name += f"-engine-{engine}"
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder
