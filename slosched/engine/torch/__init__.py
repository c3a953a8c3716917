"""The torch engine: real models over a paged KV cache.

Only this package imports torch and transformers.
"""

from slosched.engine.torch.attention import AttentionBackend, BackendUnavailableError
from slosched.engine.torch.embedded import ModelUnavailableError, default_cache_dir
from slosched.engine.torch.executor import TorchExecutor
from slosched.engine.torch.forward import UnsupportedModelError
from slosched.engine.torch.kv_cache import KVGeometry, PagedKVCache, default_num_blocks
from slosched.engine.torch.model import LoadedModel, load_model

__all__ = [
    "AttentionBackend",
    "BackendUnavailableError",
    "KVGeometry",
    "LoadedModel",
    "ModelUnavailableError",
    "PagedKVCache",
    "TorchExecutor",
    "UnsupportedModelError",
    "default_cache_dir",
    "default_num_blocks",
    "load_model",
]
