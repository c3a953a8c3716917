"""Today's engines with their own defaults: known behaviours, reproduced in the simulator."""
