"""Where one SuperLink of Flower ends: processor time of a poll, a message and a megabyte.

    python bench/superlink.py            a SuperLink with TLS, its database in memory, 16 nodes

Nodes are threads with Flower's own connection to a SuperLink (keys, signatures, messages in parts),
without the process that would train. All share this machine's cores, so what is measured is the
processor time of the SuperLink alone, not how many messages a second went through.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
NODES, POLLING = 16, 5.0
PHASES = ((250, 8), (250_000, 4), (2_500_000, 2))
"""Numbers in a message, and how often each node gets one and sends one."""

SERVER = """
import os, time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()

def spent(pid):
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

@app.main()
def main(grid: Grid, context) -> None:
    pid = context.run_config["superlink"]
    while len(nodes := list(grid.get_node_ids())) < NODES:
        time.sleep(0.2)
    for size, repeats in PHASES:
        for number in range(repeats + 1):
            if number == 1:  # the first is not counted
                began, before, answers = time.perf_counter(), spent(pid), 0
            value = np.full(size, number, dtype=np.float32)
            value[0] = time.time()
            content = RecordDict({"arrays": ArrayRecord({"w": Array(value)})})
            asked = [Message(content, dst_node_id=n, message_type="train") for n in nodes]
            found = list(grid.send_and_receive(asked))
            assert len(found) == NODES and all(m.has_content() for m in found), found
            answers = answers + NODES if number else 0
        took, busy = time.perf_counter() - began, spent(pid) - before
        print(f"MEASURED {size} {answers} {took:.3f} {busy:.3f}", flush=True)
"""


def spent(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Nodes:
    """Threads that ask a SuperLink for messages and answer each with as many numbers."""

    def __init__(self, address: str, certificate: Path) -> None:
        self.polls = itertools.count()
        self.stopped, self.pause = threading.Event(), 0.0
        self.threads = [
            threading.Thread(target=self._node, args=(address, certificate, number), daemon=True)
            for number in range(NODES)
        ]
        for thread in self.threads:
            thread.start()

    def _node(self, address: str, certificate: Path, number: int) -> None:
        from flwr.app import Array, ArrayRecord, Message, RecordDict
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            iterate_object_tree,
        )
        from flwr.supercore.inflatable.inflatable_utils import (
            inflate_object_from_contents,
            pull_objects,
            push_object_contents_from_iterable,
        )
        from flwr.supernode.fleet_http_connection import http_request_response

        draws = np.random.default_rng(number)
        with http_request_response(address, False, certificate.read_bytes()) as connection:
            _, receive, send, _, _, pull, push, confirm = connection
            while not self.stopped.is_set():
                next(self.polls)
                if (found := receive()) is None:
                    self.stopped.wait(self.pause)
                    continue
                message, tree = found
                run = message.metadata.run_id
                names = [part.object_id for part in iterate_object_tree(tree)]
                contents = pull_objects(names, pull_object_fn=partial(pull, run))
                confirm(run, message.metadata.message_id)
                whole = inflate_object_from_contents(tree.object_id, contents)
                size = whole.content["arrays"]["w"].numpy().size
                arrays = ArrayRecord({"w": Array(draws.random(size, dtype=np.float32))})
                reply = Message(RecordDict({"arrays": arrays}), reply_to=message)
                reply.metadata.__dict__["_message_id"] = reply.object_id
                objects = get_all_nested_objects(reply)
                wanted, session = send(reply, get_object_tree(reply), 0.0)
                parts = ((name, objects[name].deflate()) for name in objects if name in wanted)
                push_object_contents_from_iterable(parts, partial(push, run, session))

    def stop(self) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join(10)


def main() -> None:
    from prefed.flower.local_deployment import LocalFlower

    logs = Path(tempfile.mkdtemp(prefix="prefed-superlink-"))
    with LocalFlower(logs) as flower:
        app = flower.home / "bench"
        shutil.copytree(ROOT / "examples" / "flower_stock", app)
        known = f"NODES, PHASES = {NODES}, {PHASES}\n"
        (app / "stock" / "server_app.py").write_text(known + SERVER)
        config = app / "pyproject.toml"
        table = "[tool.flwr.app.config]\n"
        config.write_text(config.read_text().replace(table, table + "superlink = 0\n"))
        flower.start_superlink(in_memory=True)
        pid = flower.processes["superlink"].pid
        nodes = Nodes(flower.address, flower.home / "ca.crt")
        time.sleep(5)  # until all have come
        before, first, began = spent(pid), next(nodes.polls), time.perf_counter()
        time.sleep(POLLING)
        polls, busy = next(nodes.polls) - first, spent(pid) - before
        took = time.perf_counter() - began
        print(f"{polls} polls in {took:.1f} s: {1e3 * busy / polls:.2f} ms of a core each, so "
              f"{polls / busy:.0f} a second for a core of the SuperLink")  # fmt: skip
        nodes.pause = 3.0  # as real ones do
        run = flower.submit(app, {"superlink": pid})
        run.wait()
        nodes.stop()
    text = (logs / "run.log").read_text()
    found = re.findall(r"MEASURED (\d+) (\d+) ([\d.]+) ([\d.]+)", text)
    if len(found) != len(PHASES):
        sys.exit(f"the app failed:\n{text}")
    for size, answers, seconds, busy_seconds in found:
        each = float(busy_seconds) / int(answers)
        megabytes = 2 * 4 * int(size) / 1e6
        print(f"{4 * int(size) / 1e6:g} MB down and up, {answers} times in {float(seconds):.1f} s: "
              f"{1e3 * each:.1f} ms of a core each ({1 / each:.0f} a second), "
              f"{megabytes / each:.1f} MB a second")  # fmt: skip
    shutil.rmtree(logs)
    sys.stdout.flush()
    os._exit(0)  # whatever threads of connections still wait for


if __name__ == "__main__":
    main()
