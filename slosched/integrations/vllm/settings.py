"""What `--additional-config '{"slosched": {…}}'` says, checked before the first request."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from slosched.core import (
    NO_SLO,
    SLO,
    DeadlineRule,
    LatencyModel,
    Limits,
    Policy,
    Request,
    RequestStatus,
    SchedulerView,
    SloschedError,
)
from slosched.integrations.vllm.slo import Promises
from slosched.kv import KVCache
from slosched.perfmodel import FittedModel, load_model, scaled
from slosched.perfmodel.device import OtherDeviceError, check_device
from slosched.policy.spec import make_policy
from slosched.spelling import meant
from slosched.workload import parse_duration

SECTION = "slosched"
_SIZE = re.compile(r"[0-9.]+[bm]")
"""Parameters, as "8b"."""


class SettingsError(SloschedError, ValueError):
    """vLLM must not start with these settings."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's choices; times are seconds, or text with a unit as in "500ms"."""

    policy: str = "goodput"
    """As for `slosched replay --policy`: a name, its options, what stands around it."""
    profile: str | None = None
    """The latency model: a file that `slosched fit` saved, or the name of a bundled one."""
    any_device: bool = False
    """Take the profile even if it was measured on another device, or with another model."""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    """What a request is promised that says nothing; None promises nothing."""
    slo_tiers: Mapping[str, Mapping[str, Any]] | None = None
    """Named promises, each with `slo_ttft_s` and `slo_tpot_s`; a request names its `slo_tier`."""
    deadline_rule: DeadlineRule = DeadlineRule.MEAN_TPOT
    emulate: str | None = None
    """The latency model that an `EmulatedExecutor` takes for the device; the profile, if none is
    named."""
    emulate_slowdown: float = 1.0
    """How many times as slow the emulated device is: a small machine's API server and scheduler
    keep up with a large GPU in slow motion."""
    emulate_async: bool = True
    """Whether vLLM plans ahead of an emulated device, as it does on GPUs."""
    record: str | None = None
    """A file to which every step is written, its batch and its time, as a profile for `slosched
    fit`; one of the same model and device goes on."""

    def make_promises(self) -> Promises:
        default = _slo("slosched", self.slo_ttft_s, self.slo_tpot_s)
        tiers = {}
        for name, tier in (self.slo_tiers or {}).items():
            where = f"slosched.slo_tiers.{name}"
            _check_keys(where, tier, ("slo_ttft_s", "slo_tpot_s"))
            tiers[name] = _slo(where, tier.get("slo_ttft_s"), tier.get("slo_tpot_s"))
        return Promises(default, tiers)

    def make_model(
        self, device: str, model_names: Sequence[str] = (), count: int = 1
    ) -> FittedModel | None:
        """The latency model; refused if it was measured on something else than `count` of `device`.

        `model_names` are those of the model that is served; one of another model is refused, too.
        """
        if self.profile is None:
            return self.make_device()
        model = load_model(self.profile)
        if not self.any_device and self.emulate is None:
            try:
                check_device(model, device, count)
            except OtherDeviceError as error:
                message = str(error).replace("--force", '"any_device": true')
                raise SettingsError(f"slosched.profile: {message}") from error
            _check_model(model.provenance.get("model", ""), model_names)
        return model

    def make_device(self) -> FittedModel | None:
        """How long an emulated device's steps take; None if none is emulated."""
        if self.emulate is None:
            return None
        device = load_model(self.emulate)
        return device if self.emulate_slowdown == 1 else scaled(device, self.emulate_slowdown)

    def make_policy(self, model: LatencyModel | None, limits: Limits) -> Policy:
        """The policy, after its like had to plan a small step: one that cannot is refused."""
        try:
            make_policy(self.policy).schedule(_small_view(model, limits))
        except ValueError as error:
            raise SettingsError(
                f"slosched.policy {self.policy!r} cannot run with these settings: {error}"
                + ("" if model is not None else "; name a latency model as slosched.profile")
            ) from error
        return make_policy(self.policy)


def read_settings(additional_config: object) -> Settings:
    """The settings in vLLM's `additional_config`; SettingsError says what is wrong and where."""
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
    _check_keys(SECTION, section, tuple(field.name for field in fields(Settings)))
    try:
        rule = DeadlineRule(section.get("deadline_rule", DeadlineRule.MEAN_TPOT))
    except ValueError:
        raise SettingsError(
            f"slosched.deadline_rule {section['deadline_rule']!r} is none of "
            f"{', '.join(DeadlineRule)}"
        ) from None
    settings = Settings(**{**section, "deadline_rule": rule})
    slowdown = settings.emulate_slowdown
    if not isinstance(slowdown, int | float) or not 0 < slowdown < math.inf:
        raise SettingsError(f"slosched.emulate_slowdown must be a factor, as 4, not {slowdown!r}")
    settings.make_promises()
    return settings


def _check_keys(where: str, section: object, known: tuple[str, ...]) -> None:
    if not isinstance(section, Mapping):
        raise SettingsError(f"{where} must be an object of settings, not {section!r:.100}")
    for name in section:
        if name not in known:
            raise SettingsError(
                f"{where} has no setting {name!r}{meant(str(name), known)}; it has "
                f"{', '.join(known)}"
            )


def _check_model(measured: str, served: Sequence[str]) -> None:
    """Names of one model differ in owner and tuning; of two models, in version or size.

    A name without a size, as that of somebody's own directory, tells nothing.
    """
    words, known = _versions([measured]), _versions(served)
    if any(map(_SIZE.fullmatch, known)) and not words <= known:
        raise SettingsError(
            f"slosched.profile was measured with {measured}, but this server's model is "
            f"{served[0]}: its deadlines would be wrong; measure it with `slosched profile "
            '--engine vllm`, or insist with "any_device": true'
        )


def _versions(names: Sequence[str]) -> set[str]:
    """Words with a digit: "3.1" and "8b" of meta-llama/Llama-3.1-8B-Instruct."""
    words = (re.findall(r"[a-z0-9.]+", name.rstrip("/").split("/")[-1].lower()) for name in names)
    return {word for found in words for word in found if any(map(str.isdigit, word))}


def _slo(where: str, ttft: object, tpot: object) -> SLO:
    return SLO(
        NO_SLO.ttft_s if ttft is None else _duration(f"{where}.slo_ttft_s", ttft),
        NO_SLO.tpot_s if tpot is None else _duration(f"{where}.slo_tpot_s", tpot),
    )


def _duration(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise SettingsError(f'{name} must be a time, as 0.5 or "500ms", not {value!r:.100}')
    try:
        return parse_duration(value)
    except ValueError as error:
        raise SettingsError(f"{name}: {error}") from error


def _small_view(model: LatencyModel | None, limits: Limits) -> SchedulerView:
    """A decode, a prompt in the queue, and room for both."""
    kv = KVCache(num_blocks=64)
    slo = SLO(ttft_s=1.0, tpot_s=1.0)
    decode, prompt = Request("decode", 0.0, 16, 8, slo), Request("prompt", 0.0, 16, 8, slo)
    decode.status = RequestStatus.RUNNING
    decode.num_computed_tokens, decode.num_output_tokens = 16, 1
    decode.token_times_s.append(0.0)
    kv.grow("decode", 16)
    for request in (decode, prompt):
        request.deadline_s = limits.deadline_rule.next_deadline_s(request)
    return SchedulerView(0.0, (prompt,), (decode,), (), kv, limits, model)
