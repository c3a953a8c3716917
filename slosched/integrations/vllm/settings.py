"""The settings in `--additional-config '{"slosched": {…}}'`, checked before the first request."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from slosched.core import (
    NO_SLO,
    SLO,
    DeadlineRule,
    LatencyModel,
    Limits,
    OnInfeasible,
    Policy,
    Request,
    RequestStatus,
    SchedulerView,
    SloschedError,
)
from slosched.integrations.vllm.slo import Promises
from slosched.integrations.vllm.tenants import Tenants, read_tenants
from slosched.kv import KVCache
from slosched.perfmodel import FittedModel, load_model, scaled, with_longer_steps
from slosched.perfmodel.device import OtherDeviceError, check_device
from slosched.perfmodel.scheduling import TooSlowError, check_can_schedule
from slosched.policy.spec import make_policy
from slosched.spelling import meant
from slosched.workload import parse_duration

SECTION = "slosched"
_Choice = TypeVar("_Choice", DeadlineRule, OnInfeasible)
_SIZE = re.compile(r"[0-9.]+[bm]")
"""A model's number of parameters, such as "8b"."""


class SettingsError(SloschedError, ValueError):
    """vLLM must not start with these settings."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's choices; times are seconds, or text with a unit as in "500ms"."""

    policy: str = "goodput+door"
    """The policy as for `slosched replay --policy`: a name, its options and its wrappers."""
    profile: str | None = None
    """The latency model: a file that `slosched fit` saved, or the name of a bundled one."""
    any_device: bool = False
    """Accept the profile even if it was measured on another device or with another model."""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    """The SLO of requests that bring none, together with `slo_ttft_s`; None sets no limit."""
    slo_tiers: Mapping[str, Mapping[str, Any]] | None = None
    """Named SLOs, each with `slo_ttft_s`, `slo_tpot_s`, `slo_e2e_s` and `on_infeasible`; a request
    names its `slo_tier`, or is in the tier `default` if there is one."""
    tenants: Mapping[str, Mapping[str, Any]] | None = None
    """Tenants by name, each with `key_sha256`, the digest of its API key, and perhaps `slo_tier`,
    the tier of its requests that name none."""
    on_infeasible: OnInfeasible = OnInfeasible.REJECT
    """What becomes of a request whose SLO cannot be kept, if neither it nor its tier says."""
    deadline_rule: DeadlineRule = DeadlineRule.MEAN_TPOT
    emulate: str | None = None
    """The latency model by which an `EmulatedExecutor` takes its time.  It also serves as the
    profile if none is named."""
    emulate_slowdown: float = 1.0
    """The factor by which the emulated device is slower.  In slow motion, a small machine's API
    server and scheduler keep up with a large GPU."""
    emulate_async: bool = True
    """True if vLLM plans ahead of the emulated device, as it does on GPUs."""
    record: str | None = None
    """A file to which every step is written with its batch and time, as a profile for `slosched
    fit`.  A file of the same model and device is continued."""

    shadow: bool | str = False
    """True, or a folder, if vLLM decides and only what happens is written down: a folder for each
    start, in that folder or else in `slosched-shadow`."""

    @property
    def shadow_folder(self) -> Path:
        """Return the folder in which each start in shadow mode makes its own."""
        return Path(self.shadow if isinstance(self.shadow, str) else "slosched-shadow")

    def make_promises(self) -> Promises:
        default = _slo("slosched", self.slo_ttft_s, self.slo_tpot_s)
        tiers, of_tier = {}, {}
        for name, tier in (self.slo_tiers or {}).items():
            where = f"slosched.slo_tiers.{name}"
            _check_keys(where, tier, ("slo_ttft_s", "slo_tpot_s", "slo_e2e_s", "on_infeasible"))
            tiers[name] = _slo(
                where, tier.get("slo_ttft_s"), tier.get("slo_tpot_s"), tier.get("slo_e2e_s")
            )
            if "on_infeasible" in tier:
                of_tier[name] = _choice(
                    f"{where}.on_infeasible", tier["on_infeasible"], OnInfeasible
                )
        return Promises(default, tiers, self.on_infeasible, of_tier, _tenants(self))

    def make_model(
        self, device: str, model_names: Sequence[str] = (), count: int = 1
    ) -> FittedModel | None:
        """Return the latency model; raise SettingsError if it is not of `count` of `device`.

        A model that is too slow to schedule with is refused in the same way.

        `model_names` are the names of the served model; a profile of another model is refused, too.
        `any_device` and emulation skip these checks.
        """
        if self.profile is None:
            return self.make_device()
        model = load_model(self.profile)
        _check_speed("profile", model)
        if not self.any_device and self.emulate is None:
            try:
                check_device(model, device, count)
            except OtherDeviceError as error:
                message = str(error).replace("--force", '"any_device": true')
                raise SettingsError(f"slosched.profile: {message}") from error
            _check_model(model.provenance.get("model", ""), model_names)
        return _with_steps_in_vllm(model)

    def make_device(self) -> FittedModel | None:
        """Return the emulated device's latency model, slowed down; None if none is emulated."""
        if self.emulate is None:
            return None
        device = load_model(self.emulate)
        _check_speed("emulate", device)
        device = _with_steps_in_vllm(device)
        return device if self.emulate_slowdown == 1 else scaled(device, self.emulate_slowdown)

    def make_policy(self, model: LatencyModel | None, limits: Limits) -> Policy:
        """Return the policy, once another instance of it has planned a small step without an error.

        Raises SettingsError if it cannot run with these settings.
        """
        try:
            make_policy(self.policy).schedule(_small_view(model, limits))
        except ValueError as error:
            raise SettingsError(
                f"slosched.policy {self.policy!r} cannot run with these settings: {error}"
                + ("" if model is not None else "; name a latency model as slosched.profile")
            ) from error
        return make_policy(self.policy)


def read_settings(additional_config: object) -> Settings:
    """Return the settings in vLLM's `additional_config`; raise SettingsError if one is wrong."""
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
    _check_keys(SECTION, section, tuple(field.name for field in fields(Settings)))
    rule = section.get("deadline_rule", DeadlineRule.MEAN_TPOT)
    infeasible = section.get("on_infeasible", OnInfeasible.REJECT)
    chosen = {
        "deadline_rule": _choice("slosched.deadline_rule", rule, DeadlineRule),
        "on_infeasible": _choice("slosched.on_infeasible", infeasible, OnInfeasible),
    }
    _check_types(section)
    settings = Settings(**{**section, **chosen})
    if settings.shadow and settings.record is not None:
        raise SettingsError(
            "slosched.shadow writes the steps into its own folder: leave out slosched.record"
        )
    settings.make_promises()
    _check_tenants(settings)
    return settings


def _check_types(section: Mapping[str, Any]) -> None:
    """Raise SettingsError for a value of a type that its setting does not take.

    vLLM passes `--additional-config.slosched.any_device=False` on as the text "False", which Python
    takes for true.
    """
    for name in section.keys() & _TYPES.keys():
        is_right, expected = _TYPES[name]
        if not is_right(section[name]):
            raise SettingsError(f"{SECTION}.{name} must be {expected}, not {section[name]!r:.100}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_text_or_null(value: object) -> bool:
    return value is None or _is_text(value)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_flag_or_folder(value: object) -> bool:
    """Tell whether a value is a flag or a folder's name; "False" is probably meant as a flag."""
    return _is_flag(value) or (_is_text(value) and str(value).lower() not in ("true", "false"))


def _is_factor(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < math.inf


def _is_object_or_null(value: object) -> bool:
    return isinstance(value, Mapping | None)


_TYPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "policy": (_is_text, "text"),
    "profile": (_is_text_or_null, "text"),
    "emulate": (_is_text_or_null, "text"),
    "record": (_is_text_or_null, "the name of a file"),
    "any_device": (_is_flag, "true or false"),
    "emulate_async": (_is_flag, "true or false"),
    "emulate_slowdown": (_is_factor, "a factor, as 4"),
    "shadow": (_is_flag_or_folder, "true, false or the name of a folder"),
    "slo_tiers": (_is_object_or_null, "an object of tiers by name"),
}
"""What each setting takes, for those that are not read by a function of their own."""


def _with_steps_in_vllm(model: FittedModel) -> FittedModel:
    """Return a model of the steps that vLLM times: with all that planning ahead cannot hide."""
    return with_longer_steps(model, model.server_time.per_step_device_s)


def _tenants(settings: Settings) -> Tenants:
    try:
        return read_tenants(settings.tenants or {})
    except ValueError as error:
        raise SettingsError(f"slosched.tenants: {error}") from error


def _check_tenants(settings: Settings) -> None:
    tiers = settings.slo_tiers or {}
    for tenant in _tenants(settings).values():
        if tenant.slo_tier is not None and tenant.slo_tier not in tiers:
            raise SettingsError(
                f"slosched.tenants.{tenant.name}.slo_tier {tenant.slo_tier!r:.100} is none of "
                f"slosched.slo_tiers: {', '.join(tiers) or 'there are none'}"
            )


def _check_keys(where: str, section: object, known: tuple[str, ...]) -> None:
    if not isinstance(section, Mapping):
        raise SettingsError(f"{where} must be an object of settings, not {section!r:.100}")
    for name in section:
        if name not in known:
            raise SettingsError(
                f"{where} has no setting {name!r}{meant(str(name), known)}; it has "
                f"{', '.join(known)}"
            )


def _check_speed(where: str, model: FittedModel) -> None:
    """Raise SettingsError if the model is too slow to schedule with."""
    try:
        check_can_schedule(model)
    except TooSlowError as error:
        raise SettingsError(f"slosched.{where}: {error}") from error


def _check_model(measured: str, served: Sequence[str]) -> None:
    """Raise SettingsError if the profile's model differs from the served one in version or size.

    Names of the same model may differ in owner and tuning.  A served name without a size, such as
    that of a local directory, is always accepted.
    """
    words, known = _versions([measured]), _versions(served)
    if any(map(_SIZE.fullmatch, known)) and not words <= known:
        raise SettingsError(
            f"slosched.profile was measured with {measured}, but this server's model is "
            f"{served[0]}: its deadlines would be wrong; measure it with `slosched profile "
            '--engine vllm`, or insist with "any_device": true'
        )


def _versions(names: Sequence[str]) -> set[str]:
    """Return the words that contain a digit: "3.1" and "8b" of meta-llama/Llama-3.1-8B-Instruct."""
    words = (re.findall(r"[a-z0-9.]+", name.rstrip("/").split("/")[-1].lower()) for name in names)
    return {word for found in words for word in found if any(map(str.isdigit, word))}


def _choice(where: str, value: object, kind: type[_Choice]) -> _Choice:
    try:
        return kind(str(value))
    except ValueError:
        raise SettingsError(f"{where} {value!r:.100} is none of {', '.join(kind)}") from None


def _slo(where: str, ttft: object, tpot: object, e2e: object = None) -> SLO:
    return SLO(
        NO_SLO.ttft_s if ttft is None else _duration(f"{where}.slo_ttft_s", ttft),
        NO_SLO.tpot_s if tpot is None else _duration(f"{where}.slo_tpot_s", tpot),
        None if e2e is None else _duration(f"{where}.slo_e2e_s", e2e),
    )


def _duration(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise SettingsError(f'{name} must be a time, as 0.5 or "500ms", not {value!r:.100}')
    try:
        return parse_duration(value)
    except ValueError as error:
        raise SettingsError(f"{name}: {error}") from error


def _small_view(model: LatencyModel | None, limits: Limits) -> SchedulerView:
    """Return a view with a decode, a prompt in the queue, and room for both."""
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
