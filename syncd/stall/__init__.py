"""Mounts that do not answer: which call hangs, what a daemon last reported, and how a command ends in time.

A call to a server that is away waits in the kernel until the server is back. On NFS and Lustre the wait of a
call that looks up, lists, opens or reads is killable: the thread can do nothing more, but the process can
still end. A verb therefore works in a worker thread and notes each call to the file system before it makes it
(`calls`). The main thread watches the calls; if one takes longer than `--patience`, it prints what is known
and ends the process with `os._exit` (`verbs`). Views run each reading in a worker thread too, and fall back
to the file that each daemon keeps outside the mount (`worker`, `host_state`).

What this cannot do: some waits are uninterruptible. Data that was written to an NFS file before the server
went away must reach the server before the file is closed; a frozen local disk (`fsfreeze`) and a device that
never answers stop every write. The message is printed in time all the same, but the kernel keeps the process
until the server or the disk answers, and whoever waits for the process or reads its pipes waits as long.
"""
