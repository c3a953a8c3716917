"""Replays against a real server, and the files that replays leave."""
