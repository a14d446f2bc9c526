"""A module that ends as torch does where a library of it is missing."""

raise OSError("libcudart.so.12: cannot open shared object file: No such file or directory")
