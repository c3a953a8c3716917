"""The LoRA adapters that a server has loaded, by the names under which clients ask for them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from slosched.core import AdapterError
from slosched.engine.server.errors import ApiError

LoadAdapter = Callable[[Path], object]
"""Returns the weights in a directory as the executor wants them; raises AdapterError."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter under its name."""

    name: str
    path: Path
    lora_id: str
    """Its name to the scheduler and in the keys of the prefix cache, which no other weights have
    ever had, also if an adapter of the same name was loaded before."""
    weights: object = field(repr=False)


class Adapters:
    """The adapters of one server.  Requests in flight keep the weights that they began with."""

    def __init__(self, load: LoadAdapter | None = None) -> None:
        """`load` reads an adapter; None where there is nothing that could apply one."""
        self._load = load
        self._by_name: dict[str, NamedAdapter] = {}
        self._ids: set[str] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="slosched-adapters")

    def add_all(self, paths: Mapping[str, Path]) -> None:
        """Load adapters before serving; raise AdapterError if one of them cannot be."""
        for name, path in paths.items():
            self._add(name, path, self._weights(path))

    @property
    def loaded(self) -> tuple[NamedAdapter, ...]:
        """Return the adapters in the order in which they were loaded."""
        return tuple(self._by_name.values())

    def find(self, name: object) -> NamedAdapter | None:
        return self._by_name.get(name) if isinstance(name, str) else None

    async def load(self, name: str, path: Path, *, may_replace: bool = False) -> None:
        """Load an adapter in a thread of its own, while the engine goes on.

        Raises ApiError (400) if it cannot be, or if there is one of this name and it may not be
        replaced.
        """
        if not may_replace:
            self._check_is_free(name)
        try:
            weights = await asyncio.get_running_loop().run_in_executor(
                self._pool, self._weights, path
            )
        except AdapterError as error:
            raise ApiError(400, str(error), param="lora_path") from error
        if not may_replace:
            self._check_is_free(name)  # two clients may have asked for it at once
        self._add(name, path, weights)

    def unload(self, name: str) -> None:
        """Take an adapter's name away; its memory is free when its last request has ended.

        Raises ApiError (404) if there is none of this name.
        """
        if self._by_name.pop(name, None) is None:
            raise ApiError(404, f"no LoRA adapter {name!r:.100} is loaded", param="lora_name")

    def _check_is_free(self, name: str) -> None:
        if name in self._by_name:
            raise ApiError(
                400,
                f"a LoRA adapter {name!r:.100} is loaded; unload it, or send load_inplace=true",
                param="lora_name",
            )

    def _weights(self, path: Path) -> object:
        if self._load is None:
            raise AdapterError("this server runs no model, so that it can load no adapter")
        return self._load(path)

    def _add(self, name: str, path: Path, weights: object) -> None:
        ids = itertools.chain([name], (f"{name}@{i}" for i in itertools.count(2)))
        lora_id = next(lora_id for lora_id in ids if lora_id not in self._ids)
        self._ids.add(lora_id)
        self._by_name[name] = NamedAdapter(name, path, lora_id, weights)
