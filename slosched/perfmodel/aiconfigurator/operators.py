"""The operators of a model by what their times depend on, and the time of a step added up of them.

A step of T tokens of S requests takes

    rest(T) + logits(S) + Σ chunk attention(chunk, prior) + decode attention(B, mean context)

and, where requests are sampled with top-p, the time for that.  The sum is additive by construction:
nothing in it knows how prefill and decode disturb each other.  GEMMs, experts, all-reduces, decode
attention, and prefill attention without prior context are measured; norms and activations are
formulas of AIConfigurator.

DeepSeek's attention was measured together with its projections, for prefills and for decodes.  An
engine computes the projections of all tokens of a step at once, so they are taken out of attention
and counted with the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slosched.perfmodel.aiconfigurator.errors import MissingTablesError
from slosched.perfmodel.aiconfigurator.sampling import TopPSampling
from slosched.perfmodel.measurement import Chunk

OperatorTime = tuple[str, float, float, str]
"""Name, milliseconds, energy, and where it comes from ("silicon", "empirical", "mixed")."""

_LONG_CONTEXT = 8192
_OVERLAPPED_TOKENS = 256
"""Steps of up to so many tokens overlap what an engine overlaps in decodes, such as shared experts.

It is vLLM's default of VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD.
"""
_SHORT_PROMPT = 64
"""Tokens of prompts whose attention takes no time next to their projections."""


class OperatorEngine(Protocol):
    """The part of AIConfigurator's EngineHandle that is used here: operator times by index."""

    def evaluate_context_ops(
        self, indices: list[int], *, batch_size: int, s: int, prefix: int = 0, x: int | None = None
    ) -> list[OperatorTime]: ...

    def evaluate_generation_ops(
        self, indices: list[int], *, batch_size: int, s: int
    ) -> list[OperatorTime]: ...


@dataclass(frozen=True)
class OperatorTables:
    """The operators of one deployment, by index; all times in seconds.

    An operator whose time depends on the context is attention.  A model may have several of them,
    for its full and its windowed layers, say.
    """

    engine: OperatorEngine
    prefill_attention: tuple[int, ...]
    prefill_rest: tuple[int, ...]
    """The operators of prefills that depend on the number of tokens alone."""
    decode_attention: tuple[int, ...]
    decode_rest: tuple[int, ...]
    """The same of decodes, in which some engines overlap operators."""
    logits: int
    """The output projection among the decode operators; not every model's prefill lists it."""
    has_projections: bool = False
    """Whether the attention operators contain the projections."""
    sampling: TopPSampling | None = None
    """How long sampling takes; None leaves it out, as AIConfigurator does."""

    @classmethod
    def of(
        cls, engine: OperatorEngine, prefill: Sequence[str], decode: Sequence[str]
    ) -> OperatorTables:
        """Sort the operators, given by their names in the order of their indices."""
        prefill_attention = tuple(i for i in range(len(prefill)) if _reads_prefix(engine, i))
        decode_attention = tuple(i for i in range(len(decode)) if _reads_context(engine, i))
        if not prefill_attention or not decode_attention:
            raise MissingTablesError(
                "a step can only be composed of a model with attention; none of its operators "
                f"takes longer after a longer context: {', '.join((*prefill, *decode))}"
            )
        logits = [i for i, name in enumerate(decode) if "logits" in name]
        if len(logits) != 1:
            raise MissingTablesError(
                "a step can only be composed of a model with one output projection, not "
                f"{len(logits)}; AIConfigurator's has {', '.join(decode)}"
            )
        return cls(
            engine,
            prefill_attention,
            tuple(
                i
                for i, name in enumerate(prefill)
                if i not in prefill_attention and "logits" not in name
            ),
            decode_attention,
            tuple(i for i in range(len(decode)) if i not in (*decode_attention, *logits)),
            logits[0],
        )

    def layers_s(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch without its attention."""
        tokens = sum(new for new, _ in chunks)
        if tokens <= _OVERLAPPED_TOKENS:
            rest_s = self._decode_s(self.decode_rest, tokens, 1)
        else:
            rest_s = self.prefill_rest_s(tokens, self.prefill_rest)
        logits_s = self._decode_s((self.logits,), len(chunks), 1)
        sampling_s = self.sampling.seconds(len(chunks)) if self.sampling else 0.0
        return rest_s + self._projections_s(tokens) + logits_s + sampling_s

    def prefill_rest_s(self, num_tokens: int, indices: Sequence[int]) -> float:
        """Return the seconds of some of the prefill operators that depend on tokens alone."""
        return _seconds(
            self.engine.evaluate_context_ops(
                list(indices), batch_size=1, s=num_tokens, x=num_tokens
            )
        )

    def chunk_attention_s(self, num_new_tokens: int, num_prior_tokens: int) -> float:
        """Return the seconds of one prefill chunk's attention.

        The time is scaled from a measured one, and is at least that of two measured parts of its
        work: the chunk without prior context, and one decode that reads as many keys.
        """
        alone_s = self._prefill_attention_s(num_new_tokens, 0)
        if not num_prior_tokens:
            return alone_s
        scaled_s = self._prefill_attention_s(num_new_tokens, num_prior_tokens)
        return max(alone_s, scaled_s, self.decode_attention_s(1, num_new_tokens + num_prior_tokens))

    def decode_attention_s(self, num_decodes: int, context_tokens: int) -> float:
        """Return the seconds of the decodes' attention; contexts include the computed token."""
        whole_s = self._decode_s(self.decode_attention, num_decodes, context_tokens)
        return max(0.0, whole_s - self._projections_s(num_decodes))

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a whole step."""
        seconds = self.layers_s(chunks)
        seconds += sum(self.chunk_attention_s(*chunk) for chunk in chunks if chunk[0] > 1)
        contexts = [prior + 1 for new, prior in chunks if new == 1]
        if contexts:
            seconds += self.decode_attention_s(len(contexts), round(sum(contexts) / len(contexts)))
        return seconds

    def _prefill_attention_s(self, num_new_tokens: int, num_prior_tokens: int) -> float:
        whole_s = self._whole_attention_s(1, num_new_tokens, num_prior_tokens)
        return max(0.0, whole_s - self._projections_s(num_new_tokens))

    def _projections_s(self, num_tokens: int) -> float:
        """Return the seconds of the projections that the attention operators contain.

        They take at most as long as one prompt, and as short ones of as many tokens.
        """
        if not self.has_projections:
            return 0.0
        as_one_s = self._whole_attention_s(1, num_tokens, 0)
        if num_tokens <= _SHORT_PROMPT:
            return as_one_s
        num_prompts = -(-num_tokens // _SHORT_PROMPT)
        return min(as_one_s, self._whole_attention_s(num_prompts, _SHORT_PROMPT, 0))

    def _whole_attention_s(
        self, num_prompts: int, num_new_tokens: int, num_prior_tokens: int
    ) -> float:
        return _seconds(
            self.engine.evaluate_context_ops(
                list(self.prefill_attention),
                batch_size=num_prompts,
                s=num_new_tokens,
                prefix=num_prior_tokens,
            )
        )

    def _decode_s(self, indices: tuple[int, ...], num_decodes: int, context_tokens: int) -> float:
        return _seconds(
            self.engine.evaluate_generation_ops(
                list(indices), batch_size=num_decodes, s=context_tokens
            )
        )


def _reads_prefix(engine: OperatorEngine, index: int) -> bool:
    """Return whether a prefill operator takes longer, or less long, after a cached prefix."""
    alone, after = (
        engine.evaluate_context_ops([index], batch_size=1, s=64, prefix=prefix, x=64)
        for prefix in (0, _LONG_CONTEXT)
    )
    return _seconds(alone) != _seconds(after)


def _reads_context(engine: OperatorEngine, index: int) -> bool:
    """Return whether a decode operator's time depends on the context."""
    short, long = (
        engine.evaluate_generation_ops([index], batch_size=8, s=context)
        for context in (1, _LONG_CONTEXT)
    )
    return _seconds(short) != _seconds(long)


def _seconds(operators: Iterable[OperatorTime]) -> float:
    return sum(milliseconds for _, milliseconds, _, _ in operators) / 1e3
