"""`syncd doctor`: checks whether a mount is safe for jobs, from one host or together with a second one.

`probe` defines what a probe is and how it runs; `names`, `files` and `events` have the probes; `peer` finds
the second host and `between` measures with it; `expect` derives settings, and `report` runs and shows everything.
"""
