"""`python -m syncd` is `syncd`."""

from syncd.cli.main import main

if __name__ == "__main__":
    main()
