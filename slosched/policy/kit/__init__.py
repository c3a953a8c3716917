"""The parts that policies are made of."""
