"""Today's engines with their own defaults: what is known of them, reproduced in the simulator."""
