"""Packed linear layers compute, save and load what plain ones do, in the same memory."""

import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slosched.engine.torch import model as model_module
from slosched.engine.torch.model import load_model
from slosched.engine.torch.packed_linear import PackedLinear, pack_linears


class Tied(nn.Module):
    """Embeddings whose matrix is also that of the logits, with a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 48)
        self.middle = nn.Linear(48, 48)
        self.head = nn.Linear(48, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.embed(ids)))
        return logits


def tied(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied().eval()


@pytest.mark.parametrize("num_rows", [0, 1, 7, 300])
def test_products_are_those_of_the_plain_layers(num_rows: int) -> None:
    model, ids = tied(0), torch.arange(num_rows) % 50
    with torch.inference_mode():
        expected = model(ids)
        pack_linears(model)
        torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(model.middle, PackedLinear)
    assert isinstance(model.head, PackedLinear)


def test_a_packed_weight_replaces_the_plain_one() -> None:
    model = tied(0)
    plain = weakref.ref(model.middle.weight)
    pack_linears(model)
    assert plain() is None
    assert model.head.weight is model.embed.weight


def test_weights_are_saved_as_they_were_loaded() -> None:
    model, plain = tied(0), tied(0)
    pack_linears(model)
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


def test_other_weights_can_be_loaded() -> None:
    model, other, ids = tied(0), tied(1), torch.arange(9)
    pack_linears(model)
    model.load_state_dict(other.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), other(ids), rtol=1e-4, atol=1e-5)


def test_weights_of_another_shape_are_refused() -> None:
    model, other = tied(0), tied(0).state_dict()
    pack_linears(model)
    other["middle.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for middle\.weight"):
        model.load_state_dict(other)


def test_a_copy_has_plain_layers() -> None:
    model, plain = tied(0), tied(0)
    pack_linears(model)
    copied = deepcopy(model)
    assert type(copied.middle) is nn.Linear
    assert copied.head.weight is copied.embed.weight
    for name, weight in plain.state_dict().items():
        assert torch.equal(copied.state_dict()[name], weight), name


def test_every_linear_layer_of_a_model_on_a_cpu_is_packed() -> None:
    model = load_model("tiny-random", device="cpu", dtype="float32").model
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert linears
    assert all(isinstance(module, PackedLinear) for module in linears)


def test_weights_that_are_unpacked_as_the_model_runs_first_are_packed_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """compressed-tensors unpacks so, and fails at a weight that is in an order of ours."""
    random_model = model_module._random_model

    def compressed(*args: Any) -> Any:
        model = random_model(*args)

        def unpack(_model: nn.Module, _args: Any) -> None:
            hook.remove()
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    layer.weight.data_ptr()
                    layer.weight.data = layer.weight.data.to(torch.float32)

        hook = model.register_forward_pre_hook(unpack)
        for layer in model.model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
        return model

    monkeypatch.setattr(model_module, "_random_model", compressed)
    model = load_model("tiny-random", device="cpu", dtype="float32").model
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {PackedLinear}
