"""Tenants of a vLLM server: who a request comes from, by its API key.

The settings have SHA-256 digests instead of keys, since vLLM writes its configuration into its log.
A key stays in the API server: what goes on to the scheduler is its digest, which says who asks and
proves it.  A name would prove nothing: vLLM has paths that the middleware does not see, and on each
of them a client may write what it likes into `vllm_xargs`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slosched.workload.http_slo import TENANT_HEADERS
from slosched.workload.service_tier import check_name

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, the tier of its requests that name none, and the digest of its key."""

    name: str
    slo_tier: str | None = None
    key_sha256: str | None = None

    @property
    def proof(self) -> str:
        """Return what tells the scheduler that a request comes from this tenant."""
        return self.key_sha256 or self.name


Tenants = Mapping[str, Tenant]
"""Tenants by the SHA-256 digest of their key, in hexadecimal."""


def read_tenants(section: object) -> dict[str, Tenant]:
    """Return the tenants of the setting `tenants`; raise ValueError if one is wrong.

    An example is `{"acme": {"key_sha256": "9f86d081…", "slo_tier": "gold"}}`.
    """
    if not isinstance(section, Mapping):
        raise ValueError(f"it must be an object of tenants by name, not {section!r:.100}")
    found: dict[str, Tenant] = {}
    for name, tenant in section.items():
        check_name(name)
        known = {"key_sha256", "slo_tier"}
        if not isinstance(tenant, Mapping) or not {"key_sha256"} <= tenant.keys() <= known:
            raise ValueError(f"{name} must be an object with key_sha256, and maybe slo_tier")
        digest = tenant["key_sha256"]
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError(
                f"{name}.key_sha256 must be the 64 digits that `printf %s KEY | sha256sum` prints, "
                "and not the key itself"
            )
        if digest in found:
            raise ValueError(f"{name} has the key of {found[digest].name}")
        found[digest] = Tenant(name, tenant.get("slo_tier"), digest)
    return found


def tenant_of(headers: Mapping[str, str], tenants: Tenants) -> Tenant | None:
    """Return the tenant that a request with these headers comes from; None if that is not known.

    Its key says so.  Where no tenant has a key, llm-d's header does.
    """
    if not tenants:
        return next((Tenant(headers[name]) for name in TENANT_HEADERS if name in headers), None)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    return tenants.get(hashlib.sha256(key.strip().encode("latin-1")).hexdigest())
