"""The parts of `slosched demo`: its setup, its load, its servers, and its comparison."""
