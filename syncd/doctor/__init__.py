"""Is this mount safe? Probes of one directory, alone or together with a second host.

`finding` has the words and `probe` how one is run; `syncing`, `names`, `files`, `locks`, `events` and
`system` are the probes; `peer` finds the second host and `between` measures with it; `expect` says what
follows, `report` puts it all together and `render` shows it.
"""
