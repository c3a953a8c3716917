"""Two orders of SGLang 0.5.23, as policies of SGLang 0.5.5's scheduler.

Used by `record_sglang055.py`.  The functions that sort, and the one that leaves room beside a
chunked prompt, are 0.5.23's own and loaded from its source.  What the scheduler of 0.5.23 does and
counts around them is added to the scheduler of 0.5.5 here.
"""

from __future__ import annotations

import ast
import enum
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HRRN, SHORTEST = "hrrn", "shortest-prefill-first"
ORDERS = (HRRN, SHORTEST)
_WANTED = (
    *("_shortest_prefill_work", "_sort_by_shortest_prefill", "shortest_prefill_chunk_limit"),
    *("_uncached_len", "_sort_by_hrrn"),
)


class Rid(str):
    """A request id that sorts by queue order, where `hrrn` breaks ties by SGLang's random ids."""

    place = 0

    def __lt__(self, other: Any) -> bool:
        return self.place < int(other.place)


def load_orders(unpacked: Path) -> Any:
    """Return the class `SchedulePolicy` of 0.5.23, with only the methods that are needed."""
    path = unpacked / "sglang/srt/managers/schedule_policy.py"
    kept = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "SchedulePolicy":
            node.body = [f for f in node.body if getattr(f, "name", "") in _WANTED]
            kept.append(node)
        elif getattr(node, "name", "") in ("_ceil_div", "CacheAwarePolicy"):
            kept.append(node)
    names: dict[str, Any] = {"Enum": enum.Enum}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *kept], []), str(path), "exec"), names)
    loaded = names["SchedulePolicy"]
    loaded.by_name = {order: names["CacheAwarePolicy"](order) for order in ORDERS}
    return loaded


def make_policy(sglang: SimpleNamespace, orders: Any, scheduler: Any, name: str) -> Any:
    """Return a policy of 0.5.5 that sorts as 0.5.23 does in the order `name`."""
    decides = orders()
    decides.policy = orders.by_name[name]

    class Newer(sglang.policy.SchedulePolicy):  # type: ignore[name-defined, misc]
        def calc_priority(self, waiting_queue: list[Any]) -> bool:
            if name == HRRN and len(waiting_queue) > 128:
                return False
            later = self._compute_prefix_matches(waiting_queue, self.policy)
            for request in waiting_queue:
                num_tokens = len(request.origin_input_ids) + len(request.output_ids)
                matched = min(len(request.prefix_indices), num_tokens - 1)
                request.num_matched_prefix_tokens = matched
            if name == HRRN:
                orders._sort_by_hrrn(waiting_queue, later, scheduler.num_processed)
            else:
                orders._sort_by_shortest_prefill(waiting_queue, later)
            return True

        def chunk_limit(self, chunked: Any, num_left: int, page_size: int) -> int | None:
            chunked.full_untruncated_fill_ids = chunked.fill_ids
            chunked.prefix_len = len(chunked.prefix_indices)
            limit: int | None = decides.shortest_prefill_chunk_limit(
                chunked, scheduler.waiting_queue, num_left, page_size
            )
            return limit

    return Newer("lpm", scheduler.tree_cache, False, False, False)


def make_adder_class(adder: type, policy: Any, name: str) -> type:
    """Return a `PrefillAdder` that respects the limit on chunks and never chunks a second prompt."""

    class Newer(adder):  # type: ignore[misc, valid-type]
        def add_chunked_req(self, chunked: Any) -> Any:
            left = self.rem_chunk_tokens
            limit = policy.chunk_limit(chunked, left or 0, self.page_size)
            if limit is None:
                return super().add_chunked_req(chunked)
            self.rem_chunk_tokens = min(left, limit)
            found = super().add_chunked_req(chunked)
            self.rem_chunk_tokens += left - min(left, limit)
            return found

        def add_one_req(self, req: Any, has_chunked_req: bool, *others: Any, **named: Any) -> Any:
            left = self.rem_chunk_tokens
            would_cut = left is not None and self.ceil_paged_tokens(req.extend_input_len) > left
            if not (has_chunked_req and would_cut and name == SHORTEST):
                return super().add_one_req(req, has_chunked_req, *others, **named)
            self.rem_chunk_tokens = 0
            found = super().add_one_req(req, has_chunked_req, *others, **named)
            self.rem_chunk_tokens = left
            return found

    return Newer


_places = itertools.count()


def note_queued(request: Any, num_processed: int) -> None:
    """Note the place and the processed tokens of a request that joins the queue, as 0.5.23 does."""
    if not isinstance(request.rid, Rid):
        request.rid = Rid(request.rid)
    request.rid.place = next(_places)
    request.arrival_processed_tokens = num_processed
