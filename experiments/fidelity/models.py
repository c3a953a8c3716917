"""Latency models of the measured servers, from AIConfigurator's tables and nothing measured there.

`compose` makes them and keeps them in `models/`, so that simulations need no extra.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pandas as pd

from slosched.perfmodel import FittedModel, fit, load_model, save_model
from slosched.perfmodel.aiconfigurator import Deployment, compose_profile
from slosched.perfmodel.aiconfigurator.plausibility import compare_backends, most_plausible

FOLDER = Path(__file__).parent / "models"
_CHOSEN = FOLDER / "chosen.csv"
SYSTEM = "h100_sxm"
BACKENDS = ("vllm", "sglang", "trtllm")
MAX_NUM_BATCHED_TOKENS = 2048
MAX_NUM_SEQS = 128
"""The limits of most of the measured servers, for which the steps are composed."""


class Server(NamedTuple):
    """What a latency model depends on: a model of the Hugging Face hub, on so many GPUs."""

    model: str
    num_gpus: int

    @property
    def short_name(self) -> str:
        return self.model.rpartition("/")[2]


@dataclass(frozen=True)
class Architecture:
    """The sizes of a model, as its config.json on the Hugging Face hub gives them."""

    num_layers: int
    hidden: int
    num_query_heads: int
    num_kv_heads: int
    feed_forward: int
    vocabulary: int
    head: int = 128
    kind: str = "LlamaForCausalLM"
    num_experts: int = 0
    num_experts_per_token: int = 0
    samples_top_p: bool = False
    """Whether its generation_config.json sets top-p, which vLLM follows by default."""

    def config(self) -> dict[str, object]:
        """Return what AIConfigurator reads of a config.json."""
        experts = {
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_token,
        }
        return {
            "architectures": [self.kind],
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.num_query_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head,
            "intermediate_size": self.feed_forward,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32768,
            "torch_dtype": "bfloat16",
            **(experts if self.num_experts else {}),
        }


ARCHITECTURES = {
    "Llama-2-7b-hf": Architecture(32, 4096, 32, 32, 11008, 32000, samples_top_p=True),
    "Llama-2-70b-hf": Architecture(80, 8192, 64, 8, 28672, 32000, samples_top_p=True),
    "CodeLlama-34b-Instruct-hf": Architecture(48, 8192, 64, 8, 22016, 32000),
    "Mixtral-8x7B-v0.1": Architecture(
        32,
        4096,
        32,
        8,
        14336,
        32000,
        kind="MixtralForCausalLM",
        num_experts=8,
        num_experts_per_token=2,
    ),
    "Llama-3.1-70B-Instruct": Architecture(80, 8192, 64, 8, 28672, 128256, samples_top_p=True),
    "Mistral-Nemo-Instruct-2407": Architecture(40, 5120, 32, 8, 14336, 131072),
    "Qwen2.5-7B-Instruct": Architecture(
        28, 3584, 28, 4, 18944, 152064, kind="Qwen2ForCausalLM", samples_top_p=True
    ),
    "Yi-34B": Architecture(60, 7168, 56, 8, 20480, 64000),
}
"""Models by the end of their names.

Mistral-Nemo has the layers of a Llama: AIConfigurator knows no architecture of its name.  We could
not read Yi's generation_config.json and count no top-p for it; those of Mistral-Nemo, CodeLlama and
Mixtral set none.
"""


def compose(server: Server, backend: str | None = None) -> str:
    """Compose, fit and keep the model of a server with a backend's tables; return its name.

    Without a backend it is the one that `slosched profile --from aiconfigurator` takes, and it is
    noted in `chosen.csv`.
    """
    with TemporaryDirectory() as folder:
        deployment = _deployment(server, Path(folder))
        if backend is None:
            backend = most_plausible(compare_backends(deployment))
            _note_chosen(server, backend)
        profile = compose_profile(
            replace(deployment, backend=backend),
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_num_seqs=MAX_NUM_SEQS,
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_model(fit(profile).model, FOLDER / f"{name_of(server, backend)}.json")
    return name_of(server, backend)


def chosen_backends() -> dict[Server, str]:
    """Return whose tables slosched took for each server."""
    if not _CHOSEN.exists():
        return {}
    rows = pd.read_csv(_CHOSEN).itertuples()
    return {Server(str(row.model), int(str(row.num_gpus))): str(row.backend) for row in rows}


def name_of(server: Server, backend: str) -> str:
    """Return the name of a latency model: "llama-2-7b-hf-tp1-sglang"."""
    return f"{server.short_name.lower()}-tp{server.num_gpus}-{backend}"


def load(server: Server, backend: str) -> FittedModel:
    return load_model(str(FOLDER / f"{name_of(server, backend)}.json"))


def has_tables(server: Server) -> bool:
    """Tell whether a latency model of this model can be composed."""
    return server.short_name in ARCHITECTURES


def _deployment(server: Server, folder: Path) -> Deployment:
    """Return a deployment whose config.json is below `folder`."""
    # The folder's name is what the latency model's provenance says.
    named = folder / server.short_name
    named.mkdir()
    (named / "config.json").write_text(json.dumps(ARCHITECTURES[server.short_name].config()))
    return Deployment(
        SYSTEM,
        str(named),
        tensor_parallel=server.num_gpus,
        samples_top_p=ARCHITECTURES[server.short_name].samples_top_p,
    )


def _note_chosen(server: Server, backend: str) -> None:
    chosen = {**chosen_backends(), server: backend}
    rows = [(*server, chosen[server]) for server in sorted(chosen)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=["model", "num_gpus", "backend"]).to_csv(_CHOSEN, index=False)
