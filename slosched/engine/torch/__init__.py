"""The torch engine: real models over a paged KV cache.

Only this package imports torch and transformers.
"""

from slosched.engine.model_path import ModelUnavailableError
from slosched.engine.torch.attention import AttentionBackend, BackendUnavailableError
from slosched.engine.torch.control import TorchControl
from slosched.engine.torch.embedded import default_cache_dir
from slosched.engine.torch.executor import TorchExecutor
from slosched.engine.torch.forward import UnsupportedModelError
from slosched.engine.torch.graphs import graph_sizes
from slosched.engine.torch.kv_cache import KVGeometry, PagedKVCache
from slosched.engine.torch.mixed_graphs import mixed_graph_sizes
from slosched.engine.torch.model import LoadedModel, chosen_device, load_model
from slosched.engine.torch.step_memory import KVSize, LargestStep, measured_kv_size

__all__ = [
    "AttentionBackend",
    "BackendUnavailableError",
    "KVGeometry",
    "KVSize",
    "LargestStep",
    "LoadedModel",
    "ModelUnavailableError",
    "PagedKVCache",
    "TorchControl",
    "TorchExecutor",
    "UnsupportedModelError",
    "chosen_device",
    "default_cache_dir",
    "graph_sizes",
    "load_model",
    "measured_kv_size",
    "mixed_graph_sizes",
]
