"""Launch: which rank this process is, starting ranks where nobody else did, and what ranks share from then on."""
