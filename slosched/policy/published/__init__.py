"""Policies from papers, one a file."""
