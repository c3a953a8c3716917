"""Keys of full KV blocks: equal keys mean equal content."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from slosched.core import Request

Key = Hashable
"""Key of a full block and everything before it, so that it also fixes the place of the block."""


class BlockKeys:
    """The keys of one request's full blocks, found when asked for.  This base class knows none."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: list[Key] = []
        """First keys, as far as they have been asked for.  Live: read the list, do not keep it."""

    def first(self, count: int) -> Sequence[Key]:
        """Return at least the first `count` keys, or all that can be known, in a live list."""
        if len(self.known) < count:
            self._extend(count)
        return self.known

    def _extend(self, count: int) -> None:
        """Find what can be known up to `count` of them."""


class TokenKeys(BlockKeys):
    """Keys from prompt and output tokens: digests of the block's ids and of the key before.

    The digest is a strong one, because a client that can make two prompts collide reads the context
    of another (in vLLM's CVE-2025-25183 the keys were a chain of Python's `hash`).
    """

    __slots__ = ("_block_size", "_request")

    def __init__(self, request: Request, block_size: int) -> None:
        super().__init__()
        self._request = request
        self._block_size = block_size

    def _extend(self, count: int) -> None:
        request, size, known = self._request, self._block_size, self.known
        prompt, outputs = request.prompt_token_ids, request.output_token_ids
        assert prompt is not None
        num_prompt = len(prompt)
        num_tokens = num_prompt + len(outputs) - request.num_output_placeholders
        parent = known[-1] if known else _namespace(request)
        assert isinstance(parent, bytes)
        for start in range(len(known) * size, min(count, num_tokens // size) * size, size):
            token_ids = array("q", prompt[start : start + size])
            if len(token_ids) < size:
                token_ids.extend(outputs[max(0, start - num_prompt) : start + size - num_prompt])
            parent = blake2b(parent + token_ids.tobytes(), digest_size=16).digest()
            known.append(parent)


class TraceKeys(BlockKeys):
    """Keys from a trace's prefix hashes, which name the prompt in (longer) blocks of their own.

    The output of a simulated request is unknown and has no keys.
    """

    __slots__ = ("_block_size", "_chain", "_request")

    def __init__(self, request: Request, block_size: int) -> None:
        super().__init__()
        self._request = request
        self._block_size = block_size
        self._chain: list[int] = []
        """For each hash of the trace, a hash of it and of all before it."""

    def _extend(self, count: int) -> None:
        request, size = self._request, self._block_size
        hashes, of_trace, chain = request.prefix_hashes, request.prefix_block_tokens, self._chain
        assert of_trace is not None
        num_tokens = min(request.num_prompt_tokens, len(hashes) * of_trace)
        known, stop = self.known, min(count, num_tokens // size)
        while len(known) < stop:
            last = ((len(known) + 1) * size - 1) // of_trace
            while len(chain) <= last:
                before = chain[-1] if chain else hash(_namespace(request))
                chain.append(hash((before, hashes[len(chain)])))
            end = min(stop, (last + 1) * of_trace // size)
            known += [hash((chain[last], place)) for place in range(len(known), end)]


class GroupKeys(BlockKeys):
    """Keys of the prompt of a group, which all members share and no other request has.

    Where tokens or hashes tell more, their keys come first, so that other requests find them, too.
    """

    __slots__ = ("_group_id", "_more", "_most")

    def __init__(self, request: Request, block_size: int, more: BlockKeys) -> None:
        """`more` has the keys that come first."""
        super().__init__()
        assert request.group is not None
        self._group_id = request.group.group_id
        self._more = more
        self._most = (request.num_prompt_tokens - 1) // block_size
        """Full blocks before the last token of the prompt, which every member computes itself."""

    def _extend(self, count: int) -> None:
        known = self.known
        more = self._more.first(count)
        known += more[len(known) :]
        group_id, stop = self._group_id, min(count, self._most)
        known += [(group_id, place) for place in range(len(known), stop)]


def block_keys(request: Request, block_size: int) -> BlockKeys:
    """Return the keys from token ids if there are any, else from prefix hashes.

    What these do not say of a prompt comes from the request's group; without one there are no keys.
    """
    if request.prompt_token_ids is not None:
        return TokenKeys(request, block_size)
    keys = BlockKeys()
    if request.prefix_hashes and request.prefix_block_tokens:
        keys = TraceKeys(request, block_size)
    return keys if request.group is None else GroupKeys(request, block_size, keys)


def group_keys(request: Request, block_size: int) -> BlockKeys:
    """Return keys that only the members of the request's group have."""
    return GroupKeys(request, block_size, BlockKeys())


def _namespace(request: Request) -> bytes:
    """Return what must be equal besides the tokens: adapter and salt.

    An adapter changes all keys and values; a salt keeps the prompts of tenants apart.  A request
    that tells log-probabilities of its prompt finds only what it, or its group, has computed
    itself, since of what it does not compute it could not tell them.
    """
    names = (request.lora_id, request.cache_salt)
    if request.sampling.num_prompt_logprobs is not None:
        owner = request.request_id if request.group is None else request.group.group_id
        return repr((*names, owner)).encode()
    return b"" if names == (None, None) else repr(names).encode()
