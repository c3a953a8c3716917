"""Robustness: what each policy loses on a device, or to clients, that are not as it believes."""
