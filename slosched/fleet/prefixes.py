"""A router's own record of the prefixes that it has sent to each replica."""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakKeyDictionary

from slosched.core import Request
from slosched.fleet.router import Replica


class SentPrefixes:
    """Remembers for each replica the prompt blocks that it was sent last, as many as it can hold.

    Routers that hear nothing from the engines' caches go by such a record (SGLang's router, the
    approximate scorer of llm-d).  It may be wrong: an engine also evicts blocks for outputs.  What
    a replica was sent is forgotten with the replica, once its fleet has done with it.
    """

    def __init__(self) -> None:
        self._blocks: WeakKeyDictionary[Replica, OrderedDict[int, None]] = WeakKeyDictionary()

    def num_cached_tokens(self, request: Request, replica: Replica) -> int:
        """Return the prompt tokens that the replica was sent before; 0 if it caches none."""
        blocks = self._blocks.get(replica)
        if not blocks or not request.prefix_block_tokens:
            return 0
        num_found = 0
        for block in request.prefix_hashes:
            if block not in blocks:
                break
            num_found += 1
        return min(num_found * request.prefix_block_tokens, request.num_prompt_tokens - 1)

    def note(self, request: Request, replica: Replica) -> None:
        """Remember that the request was sent to the replica."""
        if not (replica.caches_prefixes and request.prefix_block_tokens):
            return
        blocks = self._blocks.setdefault(replica, OrderedDict())
        for block in reversed(request.prefix_hashes):  # the begin of a prompt is forgotten last
            blocks[block] = None
            blocks.move_to_end(block)
        most = replica.kv_tokens // request.prefix_block_tokens
        while len(blocks) > most:
            blocks.popitem(last=False)
