"""Claims of 2026 about scheduling, tried in the simulator."""
