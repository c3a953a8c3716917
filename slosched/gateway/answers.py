"""What a router takes for the answer of a replica."""

from __future__ import annotations

REDIRECTS = range(300, 400)
"""Statuses that no server for text has a reason to answer with.  Who followed them would leave the
fleet, and send a prompt and maybe a key to whatever the replica names."""
