"""Pictures of what a run reports."""
