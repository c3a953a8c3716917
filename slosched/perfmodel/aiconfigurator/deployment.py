"""A model on GPUs, by the names that AIConfigurator has for them."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.perfmodel.aiconfigurator.unmeasured import UNMEASURED
from slosched.spelling import meant

DEVICES = {
    "a100_sxm": "NVIDIA A100-SXM4-80GB",
    "b200_sxm": "NVIDIA B200",
    "b300_sxm": "NVIDIA B300 SXM6 AC",
    "gb200": "NVIDIA GB200",
    "gb300": "NVIDIA GB300",
    "h100_sxm": "NVIDIA H100 80GB HBM3",
    "h200_sxm": "NVIDIA H200",
    "l40s": "NVIDIA L40S",
    "rtx_pro_6000_server": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}
"""The name that CUDA gives the GPU, by AIConfigurator's name of the system."""

BACKENDS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
"""The engines whose kernels were measured, by AIConfigurator's names."""


def short_name(system: str) -> str:
    """Return a GPU's name without its form factor: `h100` for `h100_sxm`."""
    return system.removesuffix("_sxm").removesuffix("_server").replace("_", "")


def system_of(gpu: str) -> str:
    """Return AIConfigurator's name of a GPU that is given by that name or by a short one.

    A GPU of which it has no tables keeps its short name, a key of `UNMEASURED`.  Raises ValueError,
    with the names that there are, for any other.
    """
    wanted = gpu.lower().replace("-", "").replace("_", "")
    by_name = {
        **{short_name(system): system for system in DEVICES},
        **{system.replace("_", ""): system for system in DEVICES},
        **{name: name for name in UNMEASURED},
    }
    if wanted in by_name:
        return by_name[wanted]
    raise ValueError(
        f"no GPU {gpu!r}{meant(wanted, by_name)}; there are tables of "
        f"{', '.join(sorted(map(short_name, DEVICES)))}, and step times can be derived for "
        f"{', '.join(sorted(UNMEASURED))}"
    )


@dataclass(frozen=True)
class Deployment:
    """A model on a GPU, or on several that share each layer."""

    system: str
    model: str
    """A name on the Hugging Face hub, or a folder with a config.json."""
    backend: str = "vllm"
    tensor_parallel: int = 1
    expert_parallel: int = 1
    """Groups of GPUs that hold different experts; within a group they share each expert."""
    samples_top_p: bool = False
    """Whether the time of sampling with top-p counts; greedy sampling takes none."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(
                f"AIConfigurator has no backend {self.backend!r}; it has {', '.join(BACKENDS)}"
            )
        if self.tensor_parallel < 1 or self.expert_parallel < 1:
            raise ValueError("--tp and --ep count GPUs, so they are at least 1")
        if self.tensor_parallel % self.expert_parallel:
            raise ValueError(
                f"--ep {self.expert_parallel} does not divide --tp {self.tensor_parallel}: the "
                "experts are spread over the GPUs that share the other layers, so --ep is 1 or a "
                "divisor of --tp"
            )

    @property
    def parallelism(self) -> str:
        """Return how the GPUs share the model, in words."""
        experts = f", expert parallel {self.expert_parallel}" if self.expert_parallel > 1 else ""
        return f"tensor parallel {self.tensor_parallel}{experts}"
