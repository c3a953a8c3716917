"""Studies that slosched was judged by: each is run by one command and leaves a page in docs/."""
