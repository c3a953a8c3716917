"""Robustness: the loss of each policy when device or clients differ from what it assumes."""
