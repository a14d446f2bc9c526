"""What a person sees while it trains: a live display on a terminal, plain lines otherwise."""
