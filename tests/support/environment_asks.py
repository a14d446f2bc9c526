"""Loads environments in an interpreter that has verifiers, and prints what the explorer's program says to each."""

import json
import sys


def main(worker, *asks):
    sys.path.insert(0, worker)
    from verifiers_worker import UnusableError, loaded

    for ask in map(json.loads, asks):
        try:
            env, tasks = loaded(ask)
            roles = env.config.agent_harnesses()
            said = {
                name: [harness.id, getattr(env.config, name).runtime.type] for name, harness in roles.items()
            }
            print(json.dumps({"tasks": len(tasks), "roles": said}))
        except UnusableError as error:
            print(json.dumps({"problem": error.args[0]}))
        except Exception as error:  # noqa: BLE001 - as the program tells the explorer
            print(json.dumps({"problem": f"{type(error).__name__}: {error}"}))


if __name__ == "__main__":
    main(*sys.argv[1:])
