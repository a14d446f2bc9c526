"""Where tasks come from: one module for each kind of source, and the order in which they are taken."""
