"""The gateway: an OpenAI-style endpoint that records what agents do, token by token, and writes it as experiences."""
