"""Schedulers that pull requests and RFCs propose to an engine, one a file."""
