"""How weights travel from a trainer to an explorer: one folder for each transport, both ends in it."""
