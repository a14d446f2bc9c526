"""What computes: one interface, engines behind it, found by entry point."""
