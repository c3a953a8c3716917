"""Foreseeing the TTFT and the TPOT of a request that comes now."""
