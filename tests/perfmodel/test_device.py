"""A latency model of another device is recognised, however the system names the device."""

from __future__ import annotations

import pytest
from factories import make_model

from slosched.perfmodel import LinearModel, bundled_models, load_model
from slosched.perfmodel.device import OtherDeviceError, check_device, other_settings


def model_of(**provenance: str) -> LinearModel:
    return LinearModel(make_model().coefficients, provenance=provenance)


@pytest.mark.parametrize(
    ("said", "device"),
    [
        ({"gpu": "NVIDIA H100 80GB HBM3"}, "NVIDIA H100 80GB HBM3"),
        ({"gpu": "H100"}, "NVIDIA H100 80GB HBM3"),
        ({"gpu": "nvidia a100-sxm4-80gb"}, "NVIDIA A100-SXM4-80GB"),
        ({"device": "Intel(R) Xeon(R) Processor"}, "Intel(R) Xeon(R) Processor"),
        ({"gpu": "NVIDIA L40S", "num_gpus": "1"}, "NVIDIA L40S"),
        ({}, "whatever"),
    ],
)
def test_a_model_of_this_device_passes(said: dict[str, str], device: str) -> None:
    check_device(model_of(**said), device)


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ({}, 1),
        ({"num_gpus": "4"}, 4),
        ({"tensor_parallel_size": "2"}, 2),
        ({"tensor_parallel_size": "2", "pipeline_parallel_size": "3"}, 6),
    ],
)
def test_devices_that_share_a_step_are_counted(said: dict[str, str], count: int) -> None:
    model = model_of(device="H100", **said)
    check_device(model, "NVIDIA H100", count)
    for other in {1, 2, 4, 6} - {count}:
        with pytest.raises(OtherDeviceError, match="this device is "):
            check_device(model, "NVIDIA H100", other)


@pytest.mark.parametrize(
    ("said", "device", "named"),
    [
        ({"gpu": "NVIDIA H200"}, "NVIDIA H100 80GB HBM3", "of NVIDIA H200, but"),
        ({"gpu": "NVIDIA L40S"}, "NVIDIA L40", "of NVIDIA L40S, but"),
        ({"gpu": "NVIDIA A100-SXM4-80GB"}, "NVIDIA A100-SXM4-40GB", "A100-SXM4-80GB"),
        ({"gpu": "NVIDIA H200", "num_gpus": "4"}, "NVIDIA H200", "of 4 × NVIDIA H200, but"),
        ({"device": "AMD EPYC 7B13"}, "Intel(R) Xeon(R) Processor", "AMD EPYC 7B13"),
    ],
)
def test_a_model_of_another_device_is_refused_with_both_names(
    said: dict[str, str], device: str, named: str
) -> None:
    with pytest.raises(OtherDeviceError, match="--force") as caught:
        check_device(model_of(**said), device)
    assert named in str(caught.value)
    assert device in str(caught.value)


@pytest.mark.parametrize("name", bundled_models())
def test_every_bundled_model_knows_its_device(name: str) -> None:
    with pytest.raises(OtherDeviceError, match="a toaster"):
        check_device(load_model(name), "a toaster")


def test_settings_that_differ_are_told_with_both_values() -> None:
    here = {"model": "tiny", "dtype": "float32", "threads": "1", "attention": "cpp"}
    assert other_settings(model_of(**here), here) == ""
    assert other_settings(model_of(), here) == "", "what is not said may be the same"
    theirs = model_of(**(here | {"dtype": "bfloat16", "threads": "2"}))
    assert other_settings(theirs, here) == "dtype bfloat16 (here float32), threads 2 (here 1)"
