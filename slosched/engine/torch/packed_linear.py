"""pack_linears: stores a model's matrices as a CPU's matrix products read them fastest.

torch's `linear` multiplies by a matrix as it lies, row after row.  oneDNN, a library that torch
brings along, computes faster by the same numbers in an order that suits the processor.  Sorting
them for every product would take too long, so it is done once, when the model is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 256
"""The rows for which oneDNN is asked to choose an order; it serves fewer and more rows, too."""
_ONEDNN: Any = torch.ops.mkldnn
_HAS_ONEDNN: bool = torch._C._has_mkldnn
_IS_SUPPORTED: Mapping[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: lambda: bool(_ONEDNN._is_mkldnn_bf16_supported()),
    torch.float16: lambda: bool(_ONEDNN._is_mkldnn_fp16_supported()),
}
"""Whether this processor computes products in a type by oneDNN."""


def pack_linears(model: nn.Module) -> None:
    """Replace the linear layers of a model on a CPU by packed ones, which take as much memory.

    A weight that another layer needs as it is, such as that of tied embeddings, stays as it is, and
    only its products are computed by oneDNN.  Nothing changes on other devices, and for types that
    this processor's oneDNN does not compute.
    """
    if not _HAS_ONEDNN:
        return
    parameters = model.named_parameters(remove_duplicate=False)
    num_uses = Counter(id(parameter) for _, parameter in parameters)
    # The list has no linear layers, so that each is freed as soon as it is replaced.
    for parent in [module for module in model.modules() if not isinstance(module, nn.Linear)]:
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and _is_supported(layer.weight):
                packed = PackedLinear(layer, is_shared=num_uses[id(layer.weight)] > 1)
                setattr(parent, name, packed)


def pack_weight(weight: Tensor) -> Tensor:
    """Return a matrix [outputs, inputs] in the order in which products by it are fastest."""
    packed: Tensor = _ONEDNN._reorder_linear_weight(weight, _ROWS)
    return packed


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, of a packed matrix or a plain one."""
    product: Tensor = _ONEDNN._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _is_supported(weight: Tensor) -> bool:
    """Tell whether oneDNN computes products by this weight here."""
    on_cpu = weight.device.type == "cpu"
    return on_cpu and weight.dtype in _IS_SUPPORTED and _IS_SUPPORTED[weight.dtype]()


class PackedLinear(nn.Linear):
    """A linear layer whose products are computed by oneDNN.

    `weight` is in oneDNN's own order unless it `is_shared`; `state_dict` gives it as any other
    layer does, and `load_state_dict` takes it so.  A deep copy is a plain layer.
    """

    def __init__(self, layer: nn.Linear, *, is_shared: bool) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._is_packed = not is_shared
        self._set_weight(layer.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """Return a plain layer, whose weight can be read and changed."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = self._plain_weight() if self._is_packed else deepcopy(self.weight, memo)
        plain.bias = deepcopy(self.bias, memo)
        return plain.train(self.training)

    def _plain_weight(self) -> nn.Parameter:
        return nn.Parameter(self.weight.detach().to_dense(), requires_grad=False)

    def _set_weight(self, weight: Tensor) -> None:
        if self._is_packed:
            self.weight = nn.Parameter(pack_weight(weight), requires_grad=False)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._is_packed:
            destination[prefix + "weight"] = self._plain_weight().data

    def _load_from_state_dict(self, *args: Any) -> None:
        if not self._is_packed:
            super()._load_from_state_dict(*args)
            return
        self.weight = self._plain_weight()
        super()._load_from_state_dict(*args)
        self._set_weight(self.weight.detach())
