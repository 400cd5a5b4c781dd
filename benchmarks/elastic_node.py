"""A node's supervisor: imports what ranks need once, then forks one for each file of options that it is given.

    python elastic_node.py FOLDER [MODULE]    # MODULE: imported before

FOLDER/0.json, FOLDER/1.json, ... hold {"env": {...}, "serve": port} for a store, or a rank's options. Prints
what became of each child as a line of JSON; the children's own lines come between. Started by elastic_job.py.
"""

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path


def child(options: dict) -> None:
    os.setsid()  # a process group of its own: what is killed is all that the rank started
    os.environ.update(options["env"])
    if "serve" in options:
        from holmes.training.recovery.store import serve_store

        serve_store(options["serve"], address="0.0.0.0")
    else:
        import elastic_worker

        elastic_worker.run(options)


def main() -> None:
    folder, number, children = Path(sys.argv[1]), 0, {}
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # a child's collections need not copy every page of what was imported
    print(json.dumps({"ready": True}), flush=True)
    while True:
        for pid, job in list(children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del children[pid]
                code = os.waitstatus_to_exitcode(status)
                print(json.dumps({"ended": job, "pid": pid, "code": code}), flush=True)
        request = folder / f"{number}.json"
        if not request.exists():
            time.sleep(0.01)
            continue
        options = json.loads(request.read_text())
        pid = os.fork()
        if pid == 0:
            child(options)
            sys.stdout.flush()
            os._exit(0)  # what the supervisor has imported is not its to take down
        children[pid] = number
        print(json.dumps({"started": number, "pid": pid}), flush=True)
        number += 1


if __name__ == "__main__":
    main()
