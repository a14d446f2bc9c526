"""A job for people and programs to look at: data, tables, JSON. Needs no daemon and writes nothing."""
