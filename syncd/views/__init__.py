"""Views of a job as data and tables; they need no daemon and write nothing."""
