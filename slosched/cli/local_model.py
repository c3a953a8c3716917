"""A model that is loaded on this machine's device: what `profile` and `serve` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from slosched.cli.console import console
from slosched.cli.options import Format, KVOptions, ModelOptions
from slosched.core import Limits, SloschedError
from slosched.engine.model_path import local_directory
from slosched.engine.profiling import ProfileLimits
from slosched.perfmodel.device import cpu_name
from slosched.perfmodel.graphs import GRAPH_SIZES, StepGraphs

if TYPE_CHECKING:
    from slosched.engine.grammar import GrammarCompiler
    from slosched.engine.server import Tokenizer
    from slosched.engine.torch import LoadedModel, TorchExecutor


class ExtraMissingError(SloschedError):
    """An optional part of slosched is not installed."""


@dataclass(frozen=True)
class LocalModel:
    """A loaded model, its executor and the size of its KV cache."""

    loaded: LoadedModel
    executor: TorchExecutor
    num_blocks: int
    num_host_blocks: int
    block_size: int
    graph_sizes: Sequence[int] = ()
    """The sizes to which steps of decodes alone are padded."""

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def max_model_len(self) -> int:
        """Return the length in tokens of the longest context that model and KV cache allow."""
        return min(self.loaded.max_model_len, self.num_blocks * self.block_size)

    @property
    def block_bytes(self) -> int:
        return self.loaded.geometry.bytes_per_token * self.block_size

    def provenance(self) -> dict[str, str]:
        """Return the facts about model, device and engine to store with a measurement."""
        import torch  # only where a model runs

        is_gpu = self.loaded.device.type == "cuda"
        device = torch.cuda.get_device_name(self.loaded.device) if is_gpu else cpu_name()
        return {
            "model": self.loaded.name,
            "device": device,
            "dtype": str(self.loaded.dtype).removeprefix("torch."),
            "threads": "" if is_gpu else str(torch.get_num_threads()),
            "engine": f"slosched torch {torch.__version__}",
            "attention": self.loaded.backend.name,
            "block_size": str(self.block_size),
            **expert_facts(self.loaded.model.config.get_text_config()),
            "kv_capacity_tokens": str(self.num_blocks * self.block_size),
            **({GRAPH_SIZES: str(self._graphs)} if self.graph_sizes else {}),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    @property
    def _graphs(self) -> StepGraphs:
        """Return the sizes of decodes and, behind the largest, those of other steps."""
        largest = self.graph_sizes[-1]
        others = self.executor.mixed_graph_sizes
        sizes = (*self.graph_sizes, *(size for size in others if size > largest))
        return StepGraphs(sizes, decodes_alone=not others)

    def profile_limits(self, limits: Limits, max_context_tokens: int | None) -> ProfileLimits:
        longest = self.max_model_len
        return ProfileLimits(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_context_tokens=min(longest, max_context_tokens or longest),
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_host_blocks=self.num_host_blocks,
        )


def expert_facts(config: object) -> dict[str, str]:
    """Return how many experts a layer of the model has and how many compute a token, if any.

    `config` is that of a transformers model; its families have three names for the first number.
    """
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((n for name in names if (n := getattr(config, name, None))), None)
    per_token = getattr(config, "num_experts_per_tok", None)
    if not num_experts or not per_token:
        return {}
    return {"num_experts": str(num_experts), "num_experts_per_token": str(per_token)}


def runs_on_cpu(model: ModelOptions) -> bool:
    """Tell whether the options choose the CPU, which `auto` does where torch sees no GPU.

    Raises ModelUnavailableError for a path that is no directory, before torch is imported.
    """
    local_directory(model.model)
    try:
        from slosched.engine.torch import chosen_device  # takes seconds
    except ImportError as error:
        raise _torch_missing(error) from error
    return chosen_device(model.device).type == "cpu"


def _torch_missing(error: ImportError) -> ExtraMissingError:
    return ExtraMissingError(
        f"running a model needs the torch extra ({error}): pip install 'slosched[torch]'"
    )


def open_local(
    model: ModelOptions,
    kv: KVOptions,
    limits: Limits,
    seed: int = 0,
    *,
    num_prefix_host_blocks: int = 0,
    num_draft_tokens: int = 0,
) -> LocalModel:
    """Load the model and reserve its KV cache.

    If `kv` gives no size, the cache gets what the largest step that `limits` allow leaves free, in
    which decodes verify up to `num_draft_tokens`: see `measured_kv_size`.  Host memory gets the
    blocks that `kv` asks for, and `num_prefix_host_blocks` more.
    """
    try:
        from slosched.engine.torch import (  # takes seconds
            LargestStep,
            TorchExecutor,
            graph_sizes,
            load_model,
            measured_kv_size,
            mixed_graph_sizes,
        )
    except ImportError as error:
        raise _torch_missing(error) from error
    with console.status(f"loading {model.model}"):
        loaded = load_model(
            model.model,
            dtype=model.dtype,
            device=model.device,
            load_format="dummy" if model.load_format is Format.DUMMY else "auto",
            attention=model.attention,
            block_size=kv.block_size,
            seed=seed,
            num_threads=model.threads,
        )
        sizes = graph_sizes(model.graph_sizes, loaded, limits.max_num_seqs)
        mixed_sizes = mixed_graph_sizes(sizes, loaded)
        size = None
        if kv.kv_tokens is None:
            largest = LargestStep(limits, num_draft_tokens, sizes, mixed_sizes)
            size = measured_kv_size(loaded, largest, kv.block_size, seed=seed)
        num_blocks = kv.num_blocks(0 if size is None else size.num_blocks * kv.block_size)
        executor = TorchExecutor(
            loaded,
            num_blocks=num_blocks,
            block_size=kv.block_size,
            num_host_blocks=kv.num_host_blocks + num_prefix_host_blocks,
            seed=seed,
            graph_sizes=sizes,
            mixed_graph_sizes=mixed_sizes,
            most_sequences=limits.max_num_seqs,
        )
    dtype = str(loaded.dtype).removeprefix("torch.")
    console.print(
        f"{loaded.name} on {loaded.device} in {dtype}, attention: {loaded.backend.name}",
        markup=False,
    )
    if sizes:
        how = "CUDA graphs of" if loaded.device.type == "cuda" else "no CUDA graphs, but padding to"
        console.print(f"{how} {', '.join(map(str, sizes))} decodes")
    if others := executor.mixed_graph_sizes:
        console.print(f"CUDA graphs of {', '.join(map(str, others))} tokens of other steps")
    if size is not None:
        console.print(f"{size}", markup=False)
    return LocalModel(loaded, executor, num_blocks, kv.num_host_blocks, kv.block_size, sizes)


def make_tokenizer(local: LocalModel) -> Tokenizer:
    """Return the tokenizer with which a server answers for this model."""
    from slosched.engine.server import HuggingFaceTokenizer, NoTokenizer

    loaded = local.loaded
    if loaded.tokenizer is None:
        return NoTokenizer(loaded.vocab_size, loaded.eos_token_ids)
    return HuggingFaceTokenizer(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)


def make_grammars(local: LocalModel) -> GrammarCompiler:
    """Return the compiler of the grammars that answers of this model may have to follow."""
    from slosched.engine.grammar import GuidanceCompiler, LibraryMissingError, NoGrammars

    loaded = local.loaded
    backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
    if backend is None:
        return NoGrammars(
            "structured output needs a model with a tokenizer.json, which this has not"
        )
    # A tokenizer may have more tokens than its model, as that of Gemma 3 has one for images.
    vocab_size = max(loaded.vocab_size, backend.get_vocab_size())
    try:
        return GuidanceCompiler(backend.to_str(), vocab_size, loaded.eos_token_ids)
    except (LibraryMissingError, ValueError) as error:
        return NoGrammars(str(error))
