"""How one process takes part in a job: publish, follow, lease, wait."""
