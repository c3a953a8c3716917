"""Studies by which slosched is judged: each is run by one command and makes a page in docs/."""
