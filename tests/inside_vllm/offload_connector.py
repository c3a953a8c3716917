"""vLLM's OffloadingConnector, on the scheduler's side, with a stand-in for its workers.

Workers would copy blocks between device and host.  Here a copy only takes a number of steps that
depends on its number and the seed.  Loads and stores are numbered as they begin, so that two
schedulers that decide alike see the same times.
"""

from __future__ import annotations

import random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.outputs import KVConnectorOutput


class OffloadConnector(OffloadingConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._seed = vllm_config.kv_transfer_config.kv_connector_extra_config["seed"]
        self._step = 0
        self._done_at: dict[int, int] = {}
        self._loading: dict[int, str] = {}
        self.num_stored = self.num_loaded = self.num_flushed = 0

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        self._step += 1
        for job_id in (*meta.load_jobs, *meta.store_jobs):
            lasts = random.Random(f"{self._seed} {job_id}").randint(1, 6)
            self._done_at[job_id] = self._step + lasts
        self._loading |= {job_id: job.req_id for job_id, job in meta.load_jobs.items()}
        flushed = self._done_at.keys() & (meta.jobs_to_flush or ())
        self._done_at.update(dict.fromkeys(flushed, self._step))
        self.num_stored += len(meta.store_jobs)
        self.num_loaded += len(meta.load_jobs)
        self.num_flushed += len(flushed)
        return meta

    def transferred(self) -> KVConnectorOutput:
        """Return the copies that are done; call it once for each step that comes back."""
        done = [job_id for job_id, step in self._done_at.items() if step <= self._step]
        for job_id in done:
            del self._done_at[job_id]
        loaded = {self._loading.pop(job_id) for job_id in done if job_id in self._loading}
        return KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=OffloadingWorkerMetadata(dict.fromkeys(done, 1)),
        )
