"""Which variables of the explorer's environment an agent gets: what programs need to run, and no secrets.

An agent runs what a model writes, or tools that a model drives, and they inherit its environment. So it is a list of
what goes in, not of what stays out; `explorer.agent.pass_env` adds to it.
"""

from collections.abc import Collection, Mapping

_KEPT = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "HOSTNAME",
    "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE",
    "PYTHONUTF8", "NODE_PATH", "JAVA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NO_PROXY", "no_proxy",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME",
    "HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "UV_CACHE_DIR", "UV_OFFLINE",
})  # fmt: skip
_KEPT_BEGINNINGS = ("LC_",)


def agent_environment(variables: Mapping[str, str], passed: Collection[str] = ()) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name in _KEPT or name in passed or name.startswith(_KEPT_BEGINNINGS)
    }
