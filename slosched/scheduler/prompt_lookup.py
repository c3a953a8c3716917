"""Draft tokens by prompt lookup: what followed the last few tokens where they stood before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slosched.core import Request


@dataclass
class PromptLookup:
    """Drafts from a request's own prompt and output, without a model.

    It takes the last `max_ngram` tokens, looks for the place where the same tokens stood first, and
    proposes those that followed there.  If they stood nowhere it takes one token less, down to
    `min_ngram`.  So the longest match counts, and of several as long the earliest one, which most
    tokens follow.  Source: vLLM's `NgramProposer` (`prompt_lookup_min` and `prompt_lookup_max`).
    """

    min_ngram: int = 3
    max_ngram: int = 5
    _texts: dict[str, str] = field(default_factory=dict, repr=False)
    """The known tokens of each request as characters: a string is searched at the speed of C."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"a lookup needs 1 <= min <= max, not min {self.min_ngram} and max {self.max_ngram}"
            )

    def propose(self, request: Request, max_tokens: int) -> Sequence[int]:
        """Return at most `max_tokens` drafts after a request's last token, often none.

        All its output tokens must be known.
        """
        text = self._text_of(request)
        for length in range(min(self.max_ngram, len(text) - 1), self.min_ngram - 1, -1):
            at = text.find(text[-length:], 0, len(text) - 1)
            if at >= 0:
                follows = at + length
                return [ord(token) for token in text[follows : follows + max_tokens]]
        return ()

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._texts.pop(request_id, None)

    def _text_of(self, request: Request) -> str:
        text = self._texts.get(request.request_id)
        if text is None:
            text = "".join(map(chr, request.prompt_token_ids or ()))
        num_known = max(0, len(text) - request.num_prompt_tokens)
        text += "".join(map(chr, request.output_token_ids[num_known:]))
        self._texts[request.request_id] = text
        return text
