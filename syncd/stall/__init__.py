"""Mounts that do not answer: which call hangs, what a daemon last reported, and how a command ends in time.

A call to a server that is away waits in the kernel until the server is back. On NFS and Lustre that wait is killable:
the thread can do nothing more, but the process can still end. A verb therefore works in a worker thread and notes
each call to the file system before it makes it (`calls`). The main thread watches the calls; if one takes longer than
`--patience`, it prints what is known and ends the process with `os._exit` (`verbs`). Views run each look in a worker
thread too, and fall back to the file that each daemon keeps outside the mount (`worker`, `hostfile`).

What this cannot do: a local disk that is frozen (`fsfreeze`), or a device that never answers, makes threads wait
uninterruptibly. The message is printed all the same, but the kernel keeps the process until the disk answers, and
whoever waits for the process or reads its pipes waits as long.
"""
