"""Where metrics go: JSONL always, others by entry point, none of which can stop training."""
