"""`syncd serve`: one live page about a job. Reads only, answers always, and loads nothing from anywhere else."""
