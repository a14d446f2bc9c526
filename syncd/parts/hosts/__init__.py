"""One copy of a step from the file system for any number of hosts: they divide it, and read the rest from each other.

The hosts that have a stage are in a list that the leader writes (`members.py`). Each piece of a step has an order
of hosts, the same on all of them (`order.py`): the first reads it from the file system, the others ask that one.
Pieces are proven by the root in the manifest (`pieces.py`), so no host need be trusted, and a host that is lost,
slow or wrong costs bytes only (`blame.py` decides). `gather.py` gets the pieces, `server.py` gives them,
`reader.py` is what a follower opens.
"""
