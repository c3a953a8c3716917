"""Experiments on `goodput`: ideas that replace one of its parts, and the results of each."""
