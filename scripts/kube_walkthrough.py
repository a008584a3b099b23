#!/usr/bin/env python3
"""From `helm install` to a firing alert on a Kubernetes cluster: what docs/operations.md shows.

Installs the chart with two shards of two replicas, tests it, calls it without a pause while a third shard is added and
a pod is deleted, then takes the pods of one shard away until Prometheus, with the rules as they ship, has the alert
SpmmdShardMissing firing. Every answer is checked for exact equality.

KUBECONFIG names the cluster; helm, kubectl and prometheus are on PATH. The cluster has the image, this machine reaches
its pods, and --models is a folder of its (only) node that this machine may write.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests" / "operate"), str(REPOSITORY / "client" / "examples" / "python")]

from alert_walkthrough import follow, say  # noqa: E402
from fleet import LAYERS, Caller, make_repository  # noqa: E402
from live import Prometheus  # noqa: E402

import spmmd  # noqa: E402

RELEASE = "spmmd"

# Prometheus' own Kubernetes discovery is not in every build of it (Debian's lacks it): Discovery writes this file.
SCRAPE = """
  - job_name: kubernetes
    file_sd_configs: [{{files: ["{file}"], refresh_interval: 5s}}]
"""


class Cluster:
    """helm and kubectl in one namespace."""

    def __init__(self, namespace: str, by: str, models: Path) -> None:
        self.namespace = namespace
        values: dict[str, Any] = {
            "replicas": 2,
            "workload": "StatefulSet" if by == "ordinals" else "Deployment",
            "sharding": {"shards": 2, "by": by},
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
            "server": {"maxConnectionAge": "20s", "config": {"cpu_threads": 1}},
            "cache": {"size": "1Gi"},
            "modelRepository": {"enabled": True, "existingClaim": "models"},
            "layers": [{"name": name, "file": {"path": name.replace("/", "_") + ".npy"}} for name in LAYERS],
            "podDisruptionBudget": {"enabled": True},
        }
        self._values = Path(tempfile.mkdtemp(prefix="spmmd-kube-")) / "values.json"
        self._values.write_text(json.dumps(values))
        self.run("kubectl", "create", "namespace", namespace)
        claim = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
        volume = {**claim, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(models)}}
        volume |= {"claimRef": {"namespace": namespace, "name": "models"}, "persistentVolumeReclaimPolicy": "Retain"}
        request = {**claim, "volumeName": namespace, "resources": {"requests": {"storage": "1Gi"}}}
        for kind, name, spec in (("PersistentVolume", namespace, volume), ("PersistentVolumeClaim", "models", request)):
            body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
            self.run("kubectl", "apply", "-f", "-", stdin=json.dumps(body))

    def run(self, *command: str, stdin: str = "") -> str:
        result = subprocess.run(
            [*command, "--namespace", self.namespace], input=stdin, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: {result.stderr or result.stdout}")
        return result.stdout

    def helm(self, verb: str, *settings: str) -> None:
        options = [option for setting in settings for option in ("--set", setting)]
        say(f"helm {verb} {' '.join(options)}")
        command = ["helm", verb, RELEASE, str(REPOSITORY / "helm" / "spmmd"), "-f", str(self._values), *options]
        self.run(*command, "--wait", "--timeout=10m")
        self.ready("app.kubernetes.io/name=spmmd")  # helm waits for no StatefulSet that is rolled by hand

    def ready(self, selector: str) -> None:
        """Waits for pods, once their controllers have made them."""
        time.sleep(3.0)
        self.run("kubectl", "wait", "--for=condition=Ready", "--timeout=10m", "pods", "-l", selector)

    def pods(self) -> dict[str, str]:
        """Identity of every server's pod by its name."""
        listed = self.run("kubectl", "get", "pods", "-l", "app.kubernetes.io/name=spmmd", "-o", "json")
        return {item["metadata"]["name"]: item["metadata"]["uid"] for item in json.loads(listed)["items"]}

    def shard_pods(self, shard: int) -> list[str]:
        selector = self.run("kubectl", "get", "service", f"{RELEASE}-shard-{shard}", "-o", "jsonpath={.spec.selector}")
        labels = ",".join(f"{key}={value}" for key, value in json.loads(selector).items())
        return self.run("kubectl", "get", "pods", "-l", labels, "-o", "name").split()


class Discovery:
    """Tells Prometheus what a ServiceMonitor of the chart finds: the addresses of the metrics service, by pod."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.file = folder / "targets.json"
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Discovery:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        service = f"{RELEASE}-metrics"
        command = ["kubectl", "get", "endpointslices", "-l", f"kubernetes.io/service-name={service}", "-o", "json"]
        while not self._stop.wait(2.0):
            targets = []
            for piece in json.loads(self._cluster.run(*command))["items"]:
                for endpoint in piece["endpoints"] or []:
                    labels = {
                        "job": service,
                        "namespace": self._cluster.namespace,
                        "pod": endpoint["targetRef"]["name"],
                    }
                    targets.append({"targets": [f"{endpoint['addresses'][0]}:9500"], "labels": labels})
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(targets))
            part.rename(self.file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dns", required=True, help="address of the cluster's DNS, as this machine reaches it")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--by", choices=("units", "ordinals"), default="units")
    arguments = parser.parse_args()
    namespace = f"spmmd-{arguments.by}"
    arguments.models.mkdir(parents=True, exist_ok=True)
    make_repository(arguments.models)
    (arguments.models / "layers.textproto").unlink()

    def shards(count: int) -> list[str]:
        names = [f"{RELEASE}-shard-{i}-headless.{namespace}.svc.cluster.local:8500" for i in range(count)]
        return [f"dns://{arguments.dns}:53/{name}" for name in names]

    cluster = Cluster(namespace, arguments.by, arguments.models)
    cluster.helm("install")
    before = cluster.pods()
    say(f"{len(before)} pods are ready")
    cluster.run("helm", "test", RELEASE)
    say("helm test: succeeded")
    with (
        tempfile.TemporaryDirectory(prefix="spmmd-targets-") as folder,
        Discovery(cluster, Path(folder)) as discovery,
        Prometheus([], interval="5s", scrape_configs=SCRAPE.format(file=discovery.file)) as prometheus,
        spmmd.ShardedClient(shards(2), timeout=20.0) as client,
        Caller(client) as caller,
    ):
        caller.wait()
        cluster.helm("upgrade", "sharding.shards=3", "sharding.transitionFrom=2")
        kept = sum(before.get(name) == uid for name, uid in cluster.pods().items())
        say(f"{len(cluster.pods())} pods, {kept} of them as they were")
        client.reshard(shards(3))
        say("the client has gone over to three shards")
        caller.wait()
        cluster.helm("upgrade", "sharding.shards=3")
        if arguments.by == "ordinals":
            for replica in range(2):
                selector = f"spmmd/replica={replica}"
                cluster.run("kubectl", "delete", "pods", "-l", selector)
                cluster.ready(selector)
                say(f"the pods of StatefulSet {replica} have been restarted")
                time.sleep(30.0)  # longer than maxConnectionAge, by which clients find them
        caller.wait()
        pod = cluster.shard_pods(0)[0]
        cluster.run("kubectl", "delete", pod)
        caller.wait()
        say(f"{caller.calls} calls so far, {len(caller.errors)} errors")
        assert not caller.errors, caller.errors[0]

        def counted() -> bool:
            shards_seen = prometheus.query("count(count by (shard) (spmmd_shard_count))")
            return bool(shards_seen) and shards_seen[0][1] == 3

        prometheus.wait(counted, 60, "Prometheus does not see three shards")
        (node,) = {name.removeprefix("node/") for name in cluster.run("kubectl", "get", "nodes", "-o", "name").split()}
        cluster.run("kubectl", "cordon", node)
        cluster.run("kubectl", "delete", *cluster.shard_pods(1))
        say("the pods of shard 1 are deleted, and there is no node for new ones")
        follow(prometheus, "SpmmdShardMissing", "firing", lambda: time.sleep(0.5))
        cluster.run("kubectl", "uncordon", node)
        prometheus.wait(
            lambda: all(alert["labels"]["alertname"] != "SpmmdShardMissing" for alert in prometheus.alerts()),
            180,
            "the alert does not end",
        )
        say("the node takes pods again; SpmmdShardMissing: inactive")
        failed = -1
        while len(caller.errors) > failed:  # until all layers answer again
            failed = len(caller.errors)
            caller.wait()
        codes = sorted({error.code.name for error in caller.errors})
        say(f"all layers answer; {failed} of {caller.calls} calls have failed meanwhile, with {codes}")
    cluster.run("helm", "uninstall", RELEASE, "--wait")
    cluster.run("kubectl", "delete", "namespace", namespace)
    cluster.run("kubectl", "delete", "persistentvolume", namespace)
    shutil.rmtree(arguments.models)
    say("removed")


if __name__ == "__main__":
    main()
