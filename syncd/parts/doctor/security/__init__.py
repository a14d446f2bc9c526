"""`syncd doctor --security`: what around a job is too open, judged from a snapshot of who may do what."""
