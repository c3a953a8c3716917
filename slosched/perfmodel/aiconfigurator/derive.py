"""A profile of a GPU without tables, derived from the GPUs with tables."""

from __future__ import annotations

from dataclasses import replace

from slosched.perfmodel.aiconfigurator.compose import (
    NOT_IN_IT,
    composed_measurements,
    provenance,
    with_sampling,
)
from slosched.perfmodel.aiconfigurator.deployment import BACKENDS, Deployment
from slosched.perfmodel.aiconfigurator.derived import (
    Reference,
    derivation_error,
    derived_tables,
    references_of,
)
from slosched.perfmodel.aiconfigurator.errors import MissingTablesError, NoRoomError
from slosched.perfmodel.aiconfigurator.package import VERSION, kv_room
from slosched.perfmodel.aiconfigurator.unmeasured import UNMEASURED, UnmeasuredGPU
from slosched.perfmodel.derivation import DERIVATION_ERROR, error_text
from slosched.perfmodel.measurement import Profile
from slosched.perfmodel.stress import StressLimits, stress_batches

_NUM_JUDGED, _JUDGED_SEED = 100, 1


def derive_profile(
    deployment: Deployment,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_steps: int,
    seed: int,
) -> Profile:
    """Derive `num_steps` stress batches, and the layers at every tile edge, from other GPUs.

    Raises MissingTablesError if too few GPUs have tables of the model, or if it is quantised;
    NoRoomError if it does not fit; and ValueError for more than one GPU, since a data sheet does
    not say how long all-reduces take.
    """
    gpu = UNMEASURED[deployment.system]
    if deployment.tensor_parallel > 1:
        raise ValueError(
            f"--tp {deployment.tensor_parallel}: there are no tables of {deployment.system}, and "
            "the time of its all-reduces cannot be derived from its peaks; leave out --tp"
        )
    references = references_of(deployment)
    first = references[0]
    if set(first.compiled.dtypes.values()) != {"bfloat16"}:
        raise MissingTablesError(
            f"there are no tables of {deployment.system}, and only times of bfloat16 can be "
            f"derived, not those of {deployment.model!r}, with {dict(first.compiled.dtypes)}"
        )
    near = replace(deployment, system=first.system)
    try:
        room = kv_room(near, first.compiled, max_num_batched_tokens, max_num_seqs, gpu.memory_bytes)
    except NoRoomError as reason:
        raise NoRoomError(
            f"{deployment.model} does not fit into the {gpu.memory_bytes / 1024**3:.0f} GiB of "
            f"{deployment.system}; take a smaller model"
        ) from reason
    limits = StressLimits(
        max_num_batched_tokens, max_num_seqs, kv_capacity_tokens=room.capacity_tokens
    )
    derived = derived_tables(references, gpu.peaks)
    tables = with_sampling(derived, deployment, first.compiled, gpu.peaks)
    error = derivation_error(references, stress_batches(limits, _NUM_JUDGED, _JUDGED_SEED))
    facts = {
        **provenance(near, first.compiled, room, limits),
        **_derivation(deployment, gpu, references),
        DERIVATION_ERROR: error_text(error),
    }
    return Profile(composed_measurements(tables, limits, num_steps, seed), facts)


def _derivation(
    deployment: Deployment, gpu: UnmeasuredGPU, references: tuple[Reference, ...]
) -> dict[str, str]:
    """Return what the provenance says of the derivation."""
    names = ", ".join(reference.system for reference in references)
    tflops, gb_s = gpu.peaks.flops_per_s / 1e12, gpu.peaks.bytes_per_s / 1e9
    return {
        "gpu": gpu.device,
        "engine": f"{BACKENDS[deployment.backend]}, bfloat16, {deployment.parallelism}",
        "origin": "derived from other GPUs",
        "source": f"aiconfigurator-core {VERSION}, tables of {names}; data sheet of {gpu.device}: "
        f"{tflops:g} TFLOP/s dense bfloat16, {gb_s:g} GB/s",
        "method": "NOT MEASURED: each operator takes a launch of 3 µs, and then as many times the "
        "least time that the GPU's peaks allow as on the GPUs with tables, in the geometric mean; "
        "operator times are added up",
        "not_in_it": "clock rates other than those of the data sheet, as under a limit of power; "
        + NOT_IN_IT,
    }
