"""Quotes and refusals on arrival, measured in simulation."""
