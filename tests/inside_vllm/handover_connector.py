"""A connector through which one engine hands its prompts to another, by vLLM's shared storage.

It follows the fields by which vLLM's proxies and connectors talk, `kv_transfer_params`: an engine
that is asked with `do_remote_decode` answers with what the next one needs, `do_remote_prefill`.
Only then does that one look into the storage.
"""

from __future__ import annotations

from typing import Any

from disk_connector import DiskConnector


class HandoverConnector(DiskConnector):
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if not _asks(request, "do_remote_prefill"):
            return 0, False
        found: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],
    ) -> tuple[bool, dict[str, bool] | None]:
        if not _asks(request, "do_remote_decode"):
            return False, None
        return False, {"do_remote_prefill": True, "do_remote_decode": False}


def _asks(request: Any, field: str) -> bool:
    return bool((request.kv_transfer_params or {}).get(field))
