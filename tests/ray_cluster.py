"""A Ray cluster of several raylets with fake GPUs, which lives as long as its standard input; run by Ray's own interpreter.

Reads a line of JSON with the nodes that it starts, {"name": ..., "args": {...}}, the first being the head, and prints
{"address": ..., "session": ...} when all are there. Then each line is {"add": NODE} or {"remove": NAME}, answered by {}. Every
process is ended by the object that started it, never by its name: other Rays of the machine live on.
"""

import json
import sys

from ray.cluster_utils import Cluster


def main():
    nodes = json.loads(sys.stdin.readline())
    found, cluster = {}, Cluster()
    try:
        for node in nodes:
            found[node["name"]] = cluster.add_node(**node["args"])
        print(json.dumps({"address": cluster.address}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if "add" in request:
                found[request["add"]["name"]] = cluster.add_node(**request["add"]["args"])
            else:
                cluster.remove_node(found.pop(request["remove"]), allow_graceful=False)
            print("{}", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
