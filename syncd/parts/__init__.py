"""Parts: capabilities that register themselves and can be deleted; the rest of the package names none of them."""
