"""LoRA adapters: read from peft's files, and applied to the rows of a step that need them."""

from slosched.engine.torch.lora.adapter import LoraAdapter, Targets, load_adapter, targets_of
from slosched.engine.torch.lora.rows import AdapterRows

__all__ = ["AdapterRows", "LoraAdapter", "Targets", "load_adapter", "targets_of"]
