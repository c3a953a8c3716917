"""What the router in front of four replicas decides, and what the policy in their engines does."""
