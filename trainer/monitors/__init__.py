"""Where metrics go: JSONL always, services by entry point, none of which can stop training."""
