"""The shared files in which the tools of AWS keep profiles: keys, region and endpoint by name."""

import configparser
import contextlib
import os


def read_profile() -> dict[str, str] | None:
    """Return the settings of the profile that the environment names, or of `default`; None if there is none."""
    name = os.environ.get("AWS_PROFILE", "default")
    home = os.path.expanduser("~/.aws")
    config = _section(
        os.environ.get("AWS_CONFIG_FILE", f"{home}/config"),
        "default" if name == "default" else f"profile {name}",
    )
    keys = _section(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", f"{home}/credentials"), name)
    return {**config, **keys} or None


def _section(path: str, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
        parser.read(path)
        return dict(parser.items(name)) if parser.has_section(name) else {}
    return {}
