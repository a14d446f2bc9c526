"""`syncd doctor`: checks whether a mount is safe for jobs, from one host or together with a second one."""
