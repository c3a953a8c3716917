"""Overlapped stepping: what scheduling costs, and what planning a step ahead gives back."""
