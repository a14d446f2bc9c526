"""What trainer and explorers share of a tinker server: the session with it."""
