"""Explorers: hooks that make real engines load each version, the follower that drives them, a ready explorer."""
