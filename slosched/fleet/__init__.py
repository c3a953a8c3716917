"""Replicas behind a router, in one virtual time."""
