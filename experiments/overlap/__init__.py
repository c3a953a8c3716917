"""Overlapped stepping: the cost of a decision's time, and the part that planning ahead regains."""
