"""Rolling updates: canaries show that a version is good, then the others load it, a few at a time."""
