"""The scheduler classes for `vllm serve --scheduler-cls`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from slosched.integrations.vllm.driver import Driver
from slosched.integrations.vllm.hooks import check_class, check_config, check_instance
from slosched.integrations.vllm.link import Link
from slosched.integrations.vllm.quotes import answer_calls
from slosched.integrations.vllm.record import device_name, provenance, recorder
from slosched.integrations.vllm.settings import read_settings
from slosched.integrations.vllm.shadow import Shadow
from slosched.integrations.vllm.truth import Truth


class SLOScheduler(Scheduler):  # type: ignore[misc]  # mypy does not see vLLM
    """A slosched policy in vLLM; where vLLM schedules asynchronously, an `AsyncSLOScheduler`."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG004
        is_async = vllm_config.scheduler_config.async_scheduling
        return super().__new__(AsyncSLOScheduler if is_async else cls)

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Start vLLM's scheduler and the policy's driver.

        Raises SettingsError or UnsupportedVLLMError if the policy cannot run in this vLLM.
        """
        settings = read_settings(vllm_config.additional_config)
        check_class(Scheduler)
        check_config(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        check_instance(self)
        device = device_name()
        facts = provenance(vllm_config, device, self.kv_cache_config.num_blocks)
        engine = vllm_config.parallel_config.data_parallel_index
        self._link: Link
        if settings.shadow:
            self._link = Shadow(self, settings, device, facts, engine)
        else:
            self._link = Driver(self, settings, device, recorder(settings, facts, engine))
        answer_calls()

    @property
    def truth(self) -> Truth:
        """Return the counts of what was executed as planned and what was not, so far."""
        return self._link.truth

    def quotes(
        self, lengths_tokens: Sequence[int], asked: Mapping[str, object]
    ) -> dict[str, object]:
        """Return what prompts of these lengths would be promised if they came now.

        `asked` has the fields of `vllm_xargs` that say what is to be promised.
        """
        return self._link.quotes(lengths_tokens, asked)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        vllm_schedule = super().schedule
        return self._link.schedule(lambda: vllm_schedule(*args, **kwargs))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._link.returned(scheduler_output, outputs)
        return outputs

    def _handle_stopped_request(self, request: Any) -> bool:
        """Return whether a request that has answered is over; a session may go on."""
        if request.resumable:
            self._link.answered(request.request_id)
        is_over = bool(super()._handle_stopped_request(request))
        if not is_over:
            self._link.await_input(request.request_id)
        return is_over

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return how many tokens the request may compute: vLLM's number, limited by the plan.

        vLLM calls this last for each request, after all limits of its own.
        """
        # vLLM's own rule has nothing to say about a decode, of which there are hundreds, and no
        # plan cuts one.
        if num_new_tokens == 1 and not self.num_prefill_lookahead:
            return 1
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        return self._link.caps(request, num_computed_tokens, num_new_tokens)


class AsyncSLOScheduler(SLOScheduler, AsyncScheduler):  # type: ignore[misc]
    """An `SLOScheduler` that plans each step while the one before it runs, vLLM's default on GPUs.

    Its base classes make `super()` of `SLOScheduler` mean vLLM's `AsyncScheduler`.
    """
