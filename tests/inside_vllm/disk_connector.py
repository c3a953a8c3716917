"""vLLM's ExampleConnector, the shared storage, on scheduler's side, with a stand-in for its workers.

Workers would save each prompt into a folder of the shared storage, and schedulers look for these
folders.  Here the folder is made, without a model's blocks in it, when the scheduler asks for it.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class DiskConnector(ExampleConnector):
    num_stored = num_loaded = 0

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        for request in meta.requests:
            if request.is_store:
                self.num_stored += 1
                self._generate_foldername_debug(
                    request.token_ids, request.mm_hashes, create_folder=True
                )
            else:
                self.num_loaded += 1
        return meta
