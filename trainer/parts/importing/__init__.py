"""Turns configurations of other trainers into a job's file: readers, and one table of keys for each project."""
