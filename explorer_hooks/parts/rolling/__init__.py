"""Rolling updates: a follower waits for its turn (`syncd/parts/rolling` decides whose it is)."""
