"""Groups of requests in the Scheduler: who waits for whose prompt, and who ends with whom."""

from __future__ import annotations

from slosched.core import DeviceCopy, EndReason, Request, RequestGroup, RequestStatus
from slosched.kv import KVCache

_FINISHED, _RUNNING = RequestStatus.FINISHED, RequestStatus.RUNNING


class Groups:
    """The groups that have unfinished members.  While it is false, nothing here needs to be asked.

    The first member of a group computes the prompt.  The others are held back until it has, and
    then wait for their turn as any request does, with all computed but the last token of the
    prompt.  That one gives each of them the logits of its own first token.  They hold the full
    blocks of the prompt by the prefix cache's means.  Of the last block, which each of them
    writes to, they get a copy in the step in which they start.  If no member holds that block then,
    they compute its tokens again.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._live: dict[str, RequestGroup] = {}
        self._computing: dict[str, RequestGroup] = {}
        """Groups whose first member has started and whose others are held back."""
        self._unstarted: dict[str, Request] = {}
        """Waiting requests whose prompt has been computed by another."""
        self._tails: dict[str, int] = {}
        """The block to copy, by request that may start in the next plan."""
        self._copies: list[DeviceCopy] = []
        self._to_end: dict[str, tuple[RequestGroup, EndReason]] = {}
        self._is_sharing = False

    def __bool__(self) -> bool:
        return self._is_sharing

    @property
    def has_to_end(self) -> bool:
        """Tell whether a group must end because one of its members was rejected or aborted."""
        return bool(self._to_end)

    def add(self, request: Request) -> bool:
        """Note a new member of a group; return whether another one is to compute its prompt."""
        group = _group_of(request)
        if not self._is_sharing:
            self._is_sharing = True
            self._kv.share_in_groups(True)
        self._live[group.group_id] = group
        return request is not group.members[0]

    def note_started(self, request: Request) -> None:
        """Note that a member has left the queue."""
        group = _group_of(request)
        self._unstarted.pop(request.request_id, None)
        if request is group.members[0] and not _has_emitted(request):
            self._computing[group.group_id] = group

    def note_ended(self, request: Request) -> None:
        """Note that a member has ended."""
        group = _group_of(request)
        self._unstarted.pop(request.request_id, None)
        self._tails.pop(request.request_id, None)
        if not group.num_unfinished:
            self._live.pop(group.group_id, None)
            self._computing.pop(group.group_id, None)
            self._to_end.pop(group.group_id, None)
        elif request.status is not _FINISHED:
            assert request.end_reason is not None
            self._to_end.setdefault(group.group_id, (group, request.end_reason))

    def take_released(self) -> list[Request]:
        """Return the requests whose prompt has been computed since the last call."""
        if not self._computing:
            return []
        ready = [group for group in self._computing.values() if _has_emitted(group.members[0])]
        released: list[Request] = []
        for group in ready:
            del self._computing[group.group_id]
            released += [member for member in group.members[1:] if not member.status.is_ended]
        self._unstarted |= {request.request_id: request for request in released}
        return released

    def take_to_end(self) -> list[tuple[Request, EndReason]]:
        """Return the requests that have to end with another one, and the reasons.

        One that has emitted tokens cannot be rejected, so it is aborted.
        """
        ends: list[tuple[Request, EndReason]] = []
        for group, reason in self._to_end.values():
            for member in group.members:
                if member.status.is_ended:
                    continue
                is_late = reason.status is RequestStatus.REJECTED and member.num_output_tokens
                ends.append((member, EndReason.SIBLING if is_late else reason))
        self._to_end.clear()
        return ends

    def find_tails(self) -> None:
        """Count as computed what a waiting request would get by copying a block."""
        size, found = self._kv.block_size, dict[str, int | None]()
        self._tails.clear()
        for request_id, request in self._unstarted.items():
            num_needed = request.num_prompt_tokens - 1
            num_full = num_needed // size
            if num_full * size == num_needed or request.num_computed_tokens < num_full * size:
                continue
            group = _group_of(request)
            if group.group_id not in found:
                found[group.group_id] = self._holder_of(group, num_full)
            block = found[group.group_id]
            request.num_computed_tokens = num_full * size if block is None else num_needed
            if block is not None:
                self._tails[request_id] = block

    def copy_tail(self, request: Request) -> None:
        """Give a request that starts a copy of the block that it is about to write to."""
        block = self._tails.pop(request.request_id, None)
        num_prior = request.num_computed_tokens
        if block is None or num_prior != request.num_prompt_tokens - 1:
            return
        table = self._kv.grow(request.request_id, num_prior + 1)
        self._copies.append(DeviceCopy(block, table[num_prior // self._kv.block_size]))

    def take_copies(self) -> tuple[DeviceCopy, ...]:
        """Return the copies that the planned step has to make."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def stop_if_over(self) -> None:
        """Keep no blocks for groups once all of them have ended."""
        if self._is_sharing and not self._live:
            self._is_sharing = False
            self._kv.share_in_groups(False)

    def _holder_of(self, group: RequestGroup, place: int) -> int | None:
        """Return the block that a running member holds at `place` of its table, if one does.

        Up to the last token of the prompt its content is the same for all members.
        """
        tables = self._kv.block_tables
        for member in group.members:
            if member.status is not _RUNNING:
                continue
            table = tables.get(member.request_id, ())
            if len(table) > place and member.num_computed_tokens >= member.num_prompt_tokens - 1:
                return table[place]
        return None


def _group_of(request: Request) -> RequestGroup:
    assert request.group is not None, f"{request.request_id!r} has no group"
    return request.group


def _has_emitted(request: Request) -> bool:
    """Tell whether a token has come out, not counting one of the running step."""
    return request.num_output_tokens > request.num_output_placeholders
