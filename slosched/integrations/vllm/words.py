"""What the `stop_reason` of a refused request begins with, before a colon and why."""

REJECTED = "slo_rejected"
"""The policy rejected it: HTTP 429 with the middleware."""
INVALID = "slo_invalid"
"""Its promise cannot be read: HTTP 400."""
