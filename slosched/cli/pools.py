"""Options for a prefill pool and a decode pool of replicas."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from slosched.cli import options
from slosched.fleet.routers import ROUTERS
from slosched.fleet.split import SplitConfig
from slosched.fleet.transfer import KVTransfer
from slosched.perfmodel import FittedModel, kv_bytes_per_token
from slosched.perfmodel.transformers import known_transformer

_RESERVED_TOKENS = 512
_DECODE_ROUTER = "least_requests"


class SentBy(StrEnum):
    """The parts in which KV blocks are sent to the decode pool."""

    PROMPT = "prompt"
    LAYER = "layer"


def bandwidth(text: str) -> float:
    """Return bytes/s; raise BadParameter, which typer shows with the option's name."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([MG])B/s\s*", text)
    try:
        bytes_per_s = float(match[1]) * {"M": 1e6, "G": 1e9}[match[2]] if match else 0.0
    except ValueError:
        bytes_per_s = 0.0
    if not bytes_per_s > 0:
        raise typer.BadParameter(f"{text!r} is no bandwidth in MB/s or GB/s, as in 50GB/s")
    return bytes_per_s


@dataclass(frozen=True)
class PoolOptions:
    """The options for replicas that only prefill, and others that only decode."""

    prefill_replicas: Annotated[
        str | None,
        typer.Option(
            metavar="NUM[:MODEL][,…]",
            help="Simulate this many replicas that only prefill, before --decode-replicas that "
            "compute all tokens but the first.  --router is the router of these.",
        ),
    ] = None
    decode_replicas: Annotated[
        str | None,
        typer.Option(metavar="NUM[:MODEL][,…]", help="The replicas of the decode pool."),
    ] = None
    decode_router: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:option=value,…]",
            help=f"What chooses a request's decode replica: {', '.join(ROUTERS)}.  Default: "
            f"{_DECODE_ROUTER}.",
        ),
    ] = None
    kv_bandwidth: Annotated[
        float | None,
        typer.Option(
            parser=bandwidth,
            metavar="BANDWIDTH",
            help="Bandwidth of each replica's link between the pools, all of its GPUs together: "
            "50GB/s.",
        ),
    ] = None
    kv_latency: Annotated[
        float | None,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="Time that each transfer of KV blocks takes besides: 1ms.  Default: none.",
        ),
    ] = None
    kv_sent_by: Annotated[
        SentBy | None,
        typer.Option(
            help="Send the KV blocks of a prompt when its prefill has ended, or those of each "
            "layer while the next one is computed.  Default: prompt."
        ),
    ] = None
    decode_reserve: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="KV tokens that a decode replica keeps free for each of its requests before it "
            f"takes another.  Default: {_RESERVED_TOKENS}, as SGLang.",
        ),
    ] = None

    @property
    def has_pools(self) -> bool:
        """Tell whether a prefill pool and a decode pool are asked for.

        Raises ValueError if only one of them is, or an option that is only for both.
        """
        given = {
            "--decode-router": self.decode_router,
            "--kv-bandwidth": self.kv_bandwidth,
            "--kv-latency": self.kv_latency,
            "--kv-sent-by": self.kv_sent_by,
            "--decode-reserve": self.decode_reserve,
        }
        if self.prefill_replicas and self.decode_replicas:
            return True
        if self.prefill_replicas or self.decode_replicas:
            raise ValueError(
                "a prefill pool needs a decode pool: give both --prefill-replicas 1 and "
                "--decode-replicas 1"
            )
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} is for separate pools; add --prefill-replicas 1 --decode-replicas 1"
                )
        return False

    def split_config(self, num_prefill: int, model: FittedModel, delay_s: float) -> SplitConfig:
        """Return how the pools are joined; `model` says how large a token's KV is.

        Raises ValueError if that, or the bandwidth, is not known.
        """
        if self.kv_bandwidth is None:
            raise ValueError(
                "--prefill-replicas needs the bandwidth between the pools: --kv-bandwidth 50GB/s"
            )
        token_bytes = kv_bytes_per_token(model)
        transformer = known_transformer(model.provenance)
        by_layer = self.kv_sent_by is SentBy.LAYER
        if token_bytes is None or (by_layer and transformer is None):
            raise ValueError(
                f"the sizes of {model.provenance.get('model', 'this model')!r} are not known, so "
                "the time of a KV transfer is not, either; choose a latency model of a known one"
            )
        num_parts = transformer.num_layers if by_layer and transformer is not None else 1
        return SplitConfig(
            num_prefill,
            KVTransfer(token_bytes, self.kv_bandwidth, self.kv_latency or 0.0, num_parts),
            self.decode_router or _DECODE_ROUTER,
            _RESERVED_TOKENS if self.decode_reserve is None else self.decode_reserve,
            delay_s,
        )
