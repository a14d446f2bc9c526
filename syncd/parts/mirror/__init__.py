"""A mirror copies the published versions of a job to an object store, or from one into another job."""
