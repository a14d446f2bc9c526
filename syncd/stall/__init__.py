"""File systems that do not answer: who notices, who reports, and how a command ends in time."""
