"""`python -m trainer` is `trainer`."""

from trainer.cli.main import main

if __name__ == "__main__":
    main()
