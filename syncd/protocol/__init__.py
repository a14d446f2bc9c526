"""The shared law: what lies on disk, and how it is read and written. Standard library and xxhash only.

docs/protocol.md says the same in words. Everything here goes through a `disk.Disk`.
"""
