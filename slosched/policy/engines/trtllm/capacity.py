"""TensorRT-LLM's capacity schedulers: who may hold KV blocks, a seat and a LoRA adapter."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from slosched.policy.engines.trtllm.parts import ActiveRequest, Capacity, Room


@dataclass
class GuaranteedNoEvict:
    """A request starts only if blocks for all that it may emit are free; nobody is paused.

    Generations first, then contexts in order: one that is short of blocks stops those behind it,
    one that is short of an adapter's place only itself.
    """

    def schedule_request(self, active: Sequence[ActiveRequest], room: Room) -> Capacity:
        fitting, free = _generations(active, room)
        adapters = _Adapters(room, fitting)
        prefixes = _Prefixes(active)
        _add_contexts(fitting, prefixes.worth_computing(active), free, room, adapters)
        return Capacity(fitting, ())


@dataclass
class StaticBatch:
    """A batch, and no other until all of it has ended; blocks as by `GuaranteedNoEvict`."""

    def schedule_request(self, active: Sequence[ActiveRequest], room: Room) -> Capacity:
        fitting, free = _generations(active, room)
        if not fitting:
            _add_contexts(fitting, active, free, room, _Adapters(room, ()))
        return Capacity(fitting, ())


@dataclass
class MaxUtilization:
    """Blocks for the next step are enough; where they run short, the last that began is paused.

    Whoever stands behind a paused one waits for the next step.
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
    """Its place in `active[start:end]`, or -1."""
    return next((i for i in range(end - 1, start - 1, -1) if active[i].has_begun), -1)


def _generations(active: Sequence[ActiveRequest], room: Room) -> tuple[list[ActiveRequest], int]:
    """Those that fit by the promise made to them, and the blocks that are promised to nobody."""
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
    """Until one is short of a seat or of blocks to completion."""
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
    """Places for LoRA adapters (the engine's PEFT cache, one page an adapter)."""

    def __init__(self, room: Room, used_by: Iterable[ActiveRequest]) -> None:
        self._most = room.view.limits.max_loras
        self._taken = {a.request.lora_id for a in used_by} - {None}

    def take(self, lora_id: str | None) -> bool:
        """A place for this one, if it has none yet; False if there is no more."""
        if lora_id is None or self._most is None or lora_id in self._taken:
            return True
        if len(self._taken) >= self._most:
            return False
        self._taken.add(lora_id)
        return True


class _Prefixes:
    """Blocks that are being computed: who would compute one of them again waits for it instead."""

    def __init__(self, active: Iterable[ActiveRequest]) -> None:
        self._coming: set[Hashable] = {
            a.new_block
            for a in active
            if a.new_block is not None and a.has_begun and not a.is_generation
        }

    def is_computed_by_another(self, active: ActiveRequest) -> bool:
        """If not, it counts as computed by this one from now on, even if it then does not fit."""
        block = active.new_block
        if block is None or active.num_held_blocks:
            return False
        if block in self._coming:
            return True
        self._coming.add(block)
        return False

    def worth_computing(self, active: Iterable[ActiveRequest]) -> Iterable[ActiveRequest]:
        return (a for a in active if not self.is_computed_by_another(a))
