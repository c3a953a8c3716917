"""TensorRT-LLM's capacity schedulers, which decide on KV blocks, seats and LoRA adapters."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from slosched.policy.engines.trtllm.parts import ActiveRequest, Capacity, Room


@dataclass
class GuaranteedNoEvict:
    """A request starts only if blocks for all that it may emit are free, so none is ever paused.

    Generations come first, then contexts in order.  A context that lacks blocks stops those behind
    it; one that lacks a place for its adapter stops only itself.
    """

    def schedule_request(self, active: Sequence[ActiveRequest], room: Room) -> Capacity:
        fitting, free = _generations(active, room)
        adapters = _Adapters(room, fitting)
        prefixes = _Prefixes(active)
        _add_contexts(fitting, prefixes.worth_computing(active), free, room, adapters)
        return Capacity(fitting, ())


@dataclass
class StaticBatch:
    """No request joins until the whole batch has ended; blocks as in `GuaranteedNoEvict`."""

    def schedule_request(self, active: Sequence[ActiveRequest], room: Room) -> Capacity:
        fitting, free = _generations(active, room)
        if not fitting:
            _add_contexts(fitting, active, free, room, _Adapters(room, ()))
        return Capacity(fitting, ())


@dataclass
class MaxUtilization:
    """Blocks for the next step suffice; if they run short, the last request that began is paused.

    Requests behind a paused one wait for the next step.
    """

    def schedule_request(self, active: Sequence[ActiveRequest], room: Room) -> Capacity:
        fitting: list[ActiveRequest] = []
        paused: list[ActiveRequest] = []
        free, block_size = room.num_free_blocks, room.block_size
        adapters, prefixes = _Adapters(room, ()), _Prefixes(active)
        at, end = 0, len(active)
        while at < end:
            candidate = active[at]
            if candidate.new_block is not None and prefixes.is_computed_by_another(candidate):
                at += 1
                continue
            missing = candidate.blocks_for_step(block_size)
            has_seat = len(fitting) < room.max_num_requests
            if has_seat and missing <= free and adapters.take(candidate.request.lora_id):
                fitting.append(candidate)
                free -= missing
                at += 1
                continue
            end = _last_begun(active, at, end)
            if end >= 0:
                free += active[end].num_held_blocks
                paused.append(active[end])
        return Capacity(fitting, paused)


def _last_begun(active: Sequence[ActiveRequest], start: int, end: int) -> int:
    """Return the index of the last request in `active[start:end]` that has begun, or -1."""
    return next((i for i in range(end - 1, start - 1, -1) if active[i].has_begun), -1)


def _generations(active: Sequence[ActiveRequest], room: Room) -> tuple[list[ActiveRequest], int]:
    """Return the generations that fit, and the free blocks minus all that they may still need."""
    fitting = [a for a in active if a.is_generation][: room.max_num_requests]
    promised = sum(a.blocks_to_completion(room.block_size) for a in fitting)
    return fitting, room.num_free_blocks - promised


def _add_contexts(
    fitting: list[ActiveRequest],
    active: Iterable[ActiveRequest],
    free: int,
    room: Room,
    adapters: _Adapters,
) -> None:
    """Add contexts until one lacks a seat or the blocks to its completion."""
    for candidate in active:
        if candidate.is_generation:
            continue
        missing = candidate.blocks_to_completion(room.block_size)
        if len(fitting) >= room.max_num_requests or missing > free:
            break
        if adapters.take(candidate.request.lora_id):
            fitting.append(candidate)
            free -= missing


class _Adapters:
    """The places for LoRA adapters (the engine's PEFT cache, with one page per adapter)."""

    def __init__(self, room: Room, used_by: Iterable[ActiveRequest]) -> None:
        self._most = room.view.limits.max_loras
        self._taken = {a.request.lora_id for a in used_by} - {None}

    def take(self, lora_id: str | None) -> bool:
        """Take a place for this adapter if it has none yet; return False if no place is left."""
        if lora_id is None or self._most is None or lora_id in self._taken:
            return True
        if len(self._taken) >= self._most:
            return False
        self._taken.add(lora_id)
        return True


class _Prefixes:
    """The blocks that are being computed; a request that would compute one of them again waits."""

    def __init__(self, active: Iterable[ActiveRequest]) -> None:
        self._coming: set[Hashable] = {
            a.new_block
            for a in active
            if a.new_block is not None and a.has_begun and not a.is_generation
        }

    def is_computed_by_another(self, active: ActiveRequest) -> bool:
        """Tell whether another request is computing the request's new block.

        If not, the block counts as computed by this request from now on, even if it then does not
        fit.
        """
        block = active.new_block
        if block is None or active.num_held_blocks:
            return False
        if block in self._coming:
            return True
        self._coming.add(block)
        return False

    def worth_computing(self, active: Iterable[ActiveRequest]) -> Iterable[ActiveRequest]:
        return (a for a in active if not self.is_computed_by_another(a))
