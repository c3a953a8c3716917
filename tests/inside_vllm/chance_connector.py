"""A KV connector that loads, keeps and loses blocks by chance; vLLM finds it by this module's name.

Its scheduler side is as vLLM calls it.  In place of a worker side, `transferred` says what became
of the transfers, as the model runner would.  Each answer depends on the seed, the request and the
number of steps since it arrived, and on nothing else, so that two schedulers that decide alike get
the same answers, however often they ask.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.outputs import KVConnectorOutput


@dataclass(frozen=True)
class Fate:
    """What becomes of one request's blocks."""

    num_tokens: int
    """The length of the prefix that the connector holds, in tokens."""
    is_async: bool
    num_unknown_steps: int
    """The steps for which the connector does not know `num_tokens` yet."""
    num_load_steps: int
    num_send_steps: int
    """The steps for which the connector keeps the request's blocks after its end."""
    fails: bool
    """True if the first load loses its last block, or all."""


class ChanceConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._seed = options["seed"]
        self._block_size = vllm_config.cache_config.block_size
        self._may_load = vllm_config.kv_transfer_config.is_kv_consumer
        self._may_send = vllm_config.kv_transfer_config.is_kv_producer
        self._step = 0
        self._arrived: dict[str, int] = {}
        self._loading: dict[str, int] = {}
        self._sending: dict[str, int] = {}
        self._failed: set[str] = set()
        self._fresh_blocks: dict[str, list[int]] = {}
        self.num_async = self.num_sync = self.num_sent = self.num_failed = self.num_unknown = 0

    def fate(self, request: Any) -> Fate:
        chance = random.Random(f"{self._seed} {request.request_id}")
        num_blocks = (request.num_prompt_tokens - 1) // self._block_size
        return Fate(
            num_tokens=self._block_size * chance.choice([0, chance.randint(0, num_blocks)]),
            is_async=chance.random() < 0.6,
            num_unknown_steps=chance.choice([0, 0, 3]),
            num_load_steps=chance.randint(1, 6),
            num_send_steps=chance.choice([0, 0, 4]),
            fails=chance.random() < 0.2,
        )

    def on_new_request(self, request: Any) -> None:
        self._arrived[request.request_id] = self._step

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        fate = self.fate(request)
        if not self._may_load or request.request_id in self._failed:
            return 0, False
        if self._step < self._arrived[request.request_id] + fate.num_unknown_steps:
            self.num_unknown += 1
            return None, False
        num_more = max(0, fate.num_tokens - num_computed_tokens)
        return num_more, fate.is_async and num_more > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        fate = self.fate(request)
        if not fate.is_async:
            self.num_sync += 1
            return
        self.num_async += 1
        self._loading[request.request_id] = self._step + fate.num_load_steps
        if fate.fails:
            num_loaded = num_external_tokens // self._block_size
            [table] = blocks.get_block_ids()
            end = len(table)
            self._fresh_blocks[request.request_id] = table[end - num_loaded :]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._step += 1
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        num_steps = self.fate(request).num_send_steps
        is_delayed = self._may_send and num_steps > 0 and request.request_id not in self._loading
        if is_delayed:
            self.num_sent += 1
            self._sending[request.request_id] = self._step + num_steps
        return is_delayed, None

    def transferred(self) -> KVConnectorOutput:
        """Return the transfers that are done; call it once for each step that comes back."""
        received = {name for name, done in self._loading.items() if done <= self._step}
        sent = {name for name, done in self._sending.items() if done <= self._step}
        invalid: set[int] = set()
        for name in received:
            del self._loading[name]
            if name in self._fresh_blocks:
                self.num_failed += 1
                self._failed.add(name)
                blocks = self._fresh_blocks.pop(name)
                invalid.update(blocks if len(name) % 2 else blocks[-1:])
        for name in sent:
            del self._sending[name]
        return KVConnectorOutput(
            finished_sending=sent or None,
            finished_recving=received or None,
            invalid_block_ids=invalid,
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError("this connector has no worker side")

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError("this connector has no worker side")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        raise NotImplementedError("this connector has no worker side")

    def wait_for_save(self) -> None:
        raise NotImplementedError("this connector has no worker side")
