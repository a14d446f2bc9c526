"""What a follower is made of."""
