"""The one file of a job: its sections, how it is read, and the resolved copy that the job directory keeps."""
