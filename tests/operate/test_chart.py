"""The chart through helm, Kubernetes' own schemas, and the server that its configuration is for."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from live import BLOCK, DASHBOARDS, REPOSITORY, RULES, self_signed
from local_server import LocalServer

import spmmd

CHART = REPOSITORY / "helm" / "spmmd"
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
# The oldest and the newest Kubernetes that the chart is checked with; Chart.yaml's kubeVersion is the oldest.
KUBERNETES = ("1.27", "1.37")
CONFIG_PATHS = (
    "/etc/spmmd/config",
    "/etc/spmmd/tls",
    "/etc/spmmd/client-ca",
    "/etc/spmmd/auth",
    "/models",
    "/var/cache/spmmd",
)

HELM = shutil.which("helm") or str(REPOSITORY / ".venv" / "bin" / "helm")
pytestmark = pytest.mark.skipif(not os.access(HELM, os.X_OK), reason="helm is not installed: scripts/get_helm.sh")


def helm(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)
    assert not check or result.returncode == 0, result.stderr
    return result


@cache
def render(values: Path, *options: str) -> list[dict[str, Any]]:
    """The objects of a release called `r`."""
    text = helm("template", "r", str(CHART), "--namespace=ns", "-f", str(values), *options).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def workloads(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return of_kind(objects, "Deployment") + of_kind(objects, "StatefulSet")


@pytest.fixture(params=VALUES, ids=lambda path: path.stem)
def values(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture
def objects(values: Path) -> list[dict[str, Any]]:
    return render(values)


def test_lint(values: Path) -> None:
    helm("lint", "--strict", str(CHART), "-f", str(values))


@pytest.mark.parametrize("version", KUBERNETES)
def test_objects_fit_kubernetes_schemas(objects: list[dict[str, Any]], version: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed: scripts/setup.sh --ops")
    import kubernetes_validate

    checked = 0
    for item in objects:
        if item["apiVersion"].split("/")[0] in ("monitoring.coreos.com", "keda.sh", "gateway.networking.k8s.io"):
            continue  # custom resources: test_custom_resources
        if version == "1.27" and any(
            "image" in volume for spec in pod_specs([item]) for volume in spec.get("volumes", [])
        ):
            continue  # image volumes came with 1.31
        kubernetes_validate.validate(item, version, strict=True)
        checked += 1
    assert checked >= 5


def pod_specs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    specs = [item["spec"]["template"]["spec"] for item in workloads(objects)]
    return specs + [item["spec"] for item in of_kind(objects, "Pod")]


# The fields of custom resources that the chart writes. SPMMD_CRDS may name a folder with the operators' own definitions
# (CustomResourceDefinition files), which no package registry has.
CUSTOM_FIELDS = {
    "ServiceMonitor": {"selector", "endpoints"},
    "PrometheusRule": {"groups"},
    "ScaledObject": {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "triggers"},
    "GRPCRoute": {"parentRefs", "hostnames", "rules"},
}


def strict(schema: Any) -> Any:
    """A definition's schema that refuses unknown fields, as the API server warns of them."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result.pop("anyOf", None)
        result["type"] = ["integer", "string"]
    return result


@pytest.mark.skipif("SPMMD_CRDS" not in os.environ, reason="SPMMD_CRDS names no folder with resource definitions")
def test_custom_resources_fit_their_definitions(objects: list[dict[str, Any]]) -> None:
    import jsonschema

    schemas = {}
    for path in Path(os.environ["SPMMD_CRDS"]).glob("*.yaml"):
        for definition in yaml.safe_load_all(path.read_text()):
            for version in definition["spec"]["versions"]:
                key = (f"{definition['spec']['group']}/{version['name']}", definition["spec"]["names"]["kind"])
                schemas[key] = strict(version["schema"]["openAPIV3Schema"])
    for item in objects:
        if item["kind"] in CUSTOM_FIELDS:
            schema = schemas[item["apiVersion"], item["kind"]]
            schema["properties"]["metadata"] = {}
            jsonschema.Draft7Validator(schema).validate(item)


def test_custom_resources(objects: list[dict[str, Any]]) -> None:
    for item in objects:
        if fields := CUSTOM_FIELDS.get(item["kind"]):
            assert set(item["spec"]) <= fields
    for route in of_kind(objects, "GRPCRoute"):
        assert route["spec"]["parentRefs"]
        services = {service["metadata"]["name"] for service in of_kind(objects, "Service")}
        for rule in route["spec"]["rules"]:
            assert len(rule.get("matches", [])) <= 64
            assert {backend["name"] for backend in rule["backendRefs"]} <= services


def test_routes_follow_the_rule_of_the_clients() -> None:
    routes = of_kind(render(CHART / "ci" / "sharded-values.yaml"), "GRPCRoute")
    routed = {
        header["value"]: rule["backendRefs"][0]["name"]
        for route in routes
        for rule in route["spec"]["rules"]
        for match in rule["matches"]
        for header in match["headers"]
    }
    layers = yaml.safe_load((CHART / "ci" / "sharded-values.yaml").read_text())["layers"]
    assert routed == {layer["name"]: f"r-spmmd-shard-{spmmd.shard_of(layer['name'], 5)}" for layer in layers}


def test_shards_have_replicas_of_their_own() -> None:
    objects = workloads(render(CHART / "ci" / "sharded-values.yaml"))
    assert [item["spec"]["replicas"] for item in objects] == [3, 2, 4, 2, 2]


def test_a_change_of_the_number_keeps_the_smaller_one() -> None:
    def counts(*options: str) -> list[tuple[int, ...]]:
        objects = render(CHART / "ci" / "sharded-values.yaml", *options)
        arguments = [spec["containers"][0]["args"] for spec in pod_specs(workloads(objects))]
        return sorted(tuple(int(a.split("=")[1]) for a in args if a.startswith("--shard-")) for args in arguments)

    assert counts() == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 5)]
    assert counts("--set", "sharding.shards=4", "--set", "sharding.transitionFrom=5") == counts()
    assert counts("--set", "sharding.transitionFrom=0") == [(i, 5) for i in range(5)]
    assert counts("--set", "sharding.shards=0") == [()]


def test_the_ordinals_of_statefulsets_are_shards() -> None:
    """What Kubernetes makes of the rendered pods: their index from their ordinal, and the count of the server."""

    def pods(*options: str) -> tuple[set[tuple[str, int, int]], list[Any]]:
        """(StatefulSet, shard, count) of every pod, and how each StatefulSet rolls."""
        objects = render(CHART / "ci" / "ordinals-values.yaml", *options)
        result, strategies = set(), []
        for item in of_kind(objects, "StatefulSet"):
            container = item["spec"]["template"]["spec"]["containers"][0]
            (variable,) = (variable for variable in container["env"] if variable["name"] == "POD_INDEX")
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
            assert "--shard-index=$(POD_INDEX)" in container["args"]
            flags = dict(argument.removeprefix("--").split("=") for argument in container["args"])
            count, before = int(flags["shard-count"]), int(flags.get("shard-transition-from", 0))
            low, high = min(count, before or count), max(count, before)
            assert item["spec"]["replicas"] == high
            for ordinal in range(high):
                result.add((item["metadata"]["name"], ordinal, low if ordinal < low else high))
            strategies.append(item["spec"].get("updateStrategy"))
        return result, strategies

    sets = ("r-spmmd-replica-0", "r-spmmd-replica-1")
    during = {(name, i, 4 if i < 4 else 5) for name in sets for i in range(5)}
    by_hand = [{"type": "OnDelete"}] * 2  # a rollout would take the same shard from both at once
    assert pods() == (during, by_hand)
    shrinking = pods("--set", "sharding.shards=4", "--set", "sharding.transitionFrom=5")
    assert shrinking == (during, by_hand), "the others take over what it has"
    assert pods("--set", "sharding.transitionFrom=0") == ({(name, i, 5) for name in sets for i in range(5)}, by_hand)
    one, strategies = pods("--set", "replicas=1")
    assert one == {pod for pod in during if pod[0] == sets[0]}
    assert strategies == [{"type": "RollingUpdate", "rollingUpdate": {"partition": 4}}], "only the new shard is started"
    for i, service in enumerate(
        service
        for service in of_kind(render(CHART / "ci" / "ordinals-values.yaml"), "Service")
        if service["metadata"]["name"].endswith("-headless")
    ):
        assert service["spec"]["selector"]["apps.kubernetes.io/pod-index"] == str(i)


def test_names_and_labels(objects: list[dict[str, Any]]) -> None:
    for item in objects:
        name = item["metadata"]["name"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name), name
        for label, value in item["metadata"]["labels"].items():
            assert len(value) <= 63, label
    identities = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(identities) == len(set(identities))


def test_longest_names_stay_within_kubernetes_limits() -> None:
    objects = render(
        CHART / "ci" / "sharded-values.yaml", "--set", "workload=StatefulSet", "--set", "sharding.shards=100"
    )
    long = "a" * 53
    text = helm("template", long, str(CHART), "-f", str(CHART / "ci" / "sharded-values.yaml")).stdout
    for item in [*objects, *(document for document in yaml.safe_load_all(text) if document)]:
        assert len(item["metadata"]["name"]) <= 63
        if item["kind"] in ("StatefulSet", "Deployment"):
            assert len(item["metadata"]["name"]) <= 52, "pods get a revision hash of 11 characters as a label"


def test_services_select_pods_and_name_their_ports(objects: list[dict[str, Any]]) -> None:
    pods = [item["spec"]["template"] for item in workloads(objects)]
    for service in of_kind(objects, "Service"):
        # Kubernetes labels the pods of StatefulSets with their ordinal by itself.
        selector = {**service["spec"]["selector"], "apps.kubernetes.io/pod-index": None}.items()
        selected = [
            pod
            for pod in pods
            if selector <= {**pod["metadata"]["labels"], "apps.kubernetes.io/pod-index": None}.items()
        ]
        assert selected, service["metadata"]["name"]
        for pod in selected:
            named = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
            for port in service["spec"]["ports"]:
                assert named[port["targetPort"]] == port["port"]
    for workload in workloads(objects):
        assert workload["spec"]["selector"]["matchLabels"].items() <= (
            workload["spec"]["template"]["metadata"]["labels"].items()
        )
        if workload["kind"] == "StatefulSet":
            names = {service["metadata"]["name"] for service in of_kind(objects, "Service")}
            assert workload["spec"]["serviceName"] in names
    names = {item["metadata"]["name"] for item in workloads(objects)}
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for scaler in of_kind(objects, kind):
            assert scaler["spec"]["scaleTargetRef"]["name"] in names


def test_the_test_pod_is_selected_by_nothing_and_reaches_health(objects: list[dict[str, Any]]) -> None:
    (pod,) = of_kind(objects, "Pod")
    labels = pod["metadata"]["labels"].items()
    selectors = [service["spec"]["selector"] for service in of_kind(objects, "Service")]
    for kind in ("PodDisruptionBudget", "Deployment", "StatefulSet"):
        selectors += [item["spec"]["selector"]["matchLabels"] for item in of_kind(objects, kind)]
    policies = of_kind(objects, "NetworkPolicy")
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in policies]
    assert not any(selector.items() <= labels for selector in selectors)
    for policy in policies:
        ports = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
        assert sorted(ports) == ["grpc", "health", "metrics"]
    address = pod["spec"]["containers"][0]["args"][0].removeprefix("--health-check=")
    name, port = address.split(":")
    assert name != pod["metadata"]["name"], "a pod's own name is in its /etc/hosts"
    (service,) = [item for item in of_kind(objects, "Service") if item["metadata"]["name"] == name]
    assert service["spec"]["ports"][0]["port"] == int(port)


def test_pods_are_confined(objects: list[dict[str, Any]]) -> None:
    for spec in pod_specs(objects):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 65532
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_every_mount_has_its_volume(objects: list[dict[str, Any]]) -> None:
    for workload in workloads(objects):
        spec = workload["spec"]["template"]["spec"]
        volumes = [volume["name"] for volume in spec.get("volumes", [])]
        volumes += [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])]
        mounts = [mount["name"] for mount in spec["containers"][0]["volumeMounts"]]
        assert sorted(volumes) == sorted(mounts)


def test_grace_period_outlasts_the_drain(objects: list[dict[str, Any]]) -> None:
    config = configuration(objects)
    drain = sum(int(config[key].strip('"').removesuffix("s")) for key in ("drain_delay", "drain_timeout"))
    for workload in workloads(objects):
        assert workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= drain + 10


def test_a_cache_belongs_to_one_server_and_fits_its_volume() -> None:
    def cache(values: str, *options: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
        objects = render(CHART / "ci" / f"{values}-values.yaml", *options)
        workload = workloads(objects)[0]
        mounts = workload["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
        (mount,) = (mount for mount in mounts if mount["name"] == "cache")
        return workload["spec"], mount, configuration(objects)

    _, mount, config = cache("ordinals")
    assert mount["subPathExpr"] == "$(POD_NAME)"
    assert "cache_limit_bytes" not in config, "the size of the claim is not known"
    assert cache("gpu")[2]["cache_limit_bytes"] == f'"{200 * 1024 * 9 // 10}MiB"'
    assert cache("default", "--set", "server.config.cache_limit_bytes=1GiB")[2]["cache_limit_bytes"] == '"1GiB"'
    claim = ("--set", "cache.type=existingClaim", "--set", "cache.existingClaim=c")
    spec, mount, _ = cache("default", *claim)
    assert spec["strategy"] == {"type": "Recreate"}
    assert "subPathExpr" not in mount


def test_memory_is_shared_with_who_mounts_it() -> None:
    objects = render(CHART / "ci" / "gpu-values.yaml")
    assert configuration(objects)["shared_memory"] == "true"
    (spec,) = pod_specs(workloads(objects))
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in spec["volumes"]
    for container in spec["containers"]:
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert "shared_memory" not in configuration(render(CHART / "ci" / "default-values.yaml"))


# ---- against the server


def configuration(objects: list[dict[str, Any]]) -> dict[str, str]:
    """The settings of the rendered configuration file, as text."""
    text = of_kind(objects, "ConfigMap")[0]["data"]["spmmd.textproto"]
    return dict(line.split(": ", 1) for line in text.splitlines() if line)


@pytest.fixture(scope="module")
def flags(binary: Path) -> set[str]:
    """Long flags of `spmmd --help`."""
    text = subprocess.run([str(binary), "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"--([a-z][a-z0-9-]*)", text))


def test_every_setting_and_argument_is_a_flag_of_the_server(objects: list[dict[str, Any]], flags: set[str]) -> None:
    for key in configuration(objects):
        assert key.replace("_", "-") in flags, key
    for spec in pod_specs(objects):
        for argument in spec["containers"][0]["args"]:
            assert argument.removeprefix("--").split("=")[0] in flags, argument


def test_paths_in_the_configuration_are_mounted(objects: list[dict[str, Any]]) -> None:
    paths = {value.strip('"') for value in configuration(objects).values() if value.startswith('"/')}
    for workload in workloads(objects):
        container = workload["spec"]["template"]["spec"]["containers"][0]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for path in paths:
            assert any(path == mount or path.startswith(mount + "/") for mount in mounts), path
        assert set(mounts) <= {*CONFIG_PATHS, "/tmp", "/dev/shm"}


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    """The files that the chart's volumes hold, below one folder."""
    for path in CONFIG_PATHS:
        (tmp_path / path.lstrip("/")).mkdir(parents=True)
    pem, key = self_signed(tmp_path / "etc/spmmd/tls")
    shutil.copy(pem, tmp_path / "etc/spmmd/client-ca/ca.crt")
    assert (pem.name, key.name) == ("tls.crt", "tls.key")
    tokens = tmp_path / "etc/spmmd/auth/tokens"
    tokens.write_text("admin a-token-of-sufficient-length\n")
    tokens.chmod(0o600)
    shutil.copy(BLOCK, tmp_path / "models/block.safetensors")
    shutil.copy(BLOCK, tmp_path / "models/model.safetensors")
    return tmp_path


def test_the_server_takes_the_configuration(values: Path, binary: Path, volumes: Path) -> None:
    objects = render(values, "--set", "server.drainDelaySeconds=0")
    data = of_kind(objects, "ConfigMap")[0]["data"]
    if layers := data.get("layers.json"):
        # The examples name tensors of models that are not here.
        specs = json.loads(layers)
        for spec, tensor in zip(specs["layers"], ("up.weight", "down.weight", "up.weight", "q.weight"), strict=False):
            spec["file"]["tensor"] = tensor
        (volumes / "etc/spmmd/config/layers.json").write_text(json.dumps(specs))
    text = data["spmmd.textproto"]
    for path in CONFIG_PATHS:
        text = text.replace(f'"{path}', f'"{volumes}{path}')
    text = re.sub(r'"0\.0\.0\.0:\d+"', '"127.0.0.1:0"', text).replace('backend: "cuda"', 'backend: "cpu"')
    config = volumes / "etc/spmmd/config/spmmd.textproto"
    config.write_text(text)
    for workload in workloads(objects)[-1:]:
        arguments = workload["spec"]["template"]["spec"]["containers"][0]["args"][1:]
        arguments = [argument.replace("$(POD_INDEX)", "4") for argument in arguments]
        with LocalServer(binary, [f"--config={config}", *arguments]) as server:
            assert server.running
        assert server.exit_code == 0


# ---- content


def test_rules_and_dashboards_arrive_whole() -> None:
    objects = render(CHART / "ci" / "gpu-values.yaml")
    rule = of_kind(objects, "PrometheusRule")[0]
    ours = yaml.safe_load(RULES.read_text())["groups"]
    assert rule["spec"]["groups"][: len(ours)] == ours
    assert rule["spec"]["groups"][-1]["name"] == "site"
    boards = next(item for item in of_kind(objects, "ConfigMap") if item["metadata"]["name"].endswith("-dashboards"))
    assert boards["data"] == {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("workload=DaemonSet", "workload"),
        ("server.grpcPort=99999", "grpcPort"),
        ("server.backend=gpu", "backend"),
        ("server.logLevel=chatty", "logLevel"),
        ("server.config.listen=0.0.0.0:1", "invalid propertyName 'listen'"),
        ("server.maxConnectionAge=ten", "maxConnectionAge"),
        ("cache.size=lots", "size"),
        ("modelRepository.subPath=../etc", "subPath"),
        ("nosuch.value=1", "nosuch"),
        ("image.digest=sha256:abc", "digest"),
        ("gateway.enabled=true", "parentRefs"),
        ("sharding.shards=101", "shards"),
        ("sharding.shards=2,sharding.by=ordinals", "needs workload StatefulSet"),
        ("sharding.shards=2,sharding.by=ordinals,workload=StatefulSet,autoscaling.enabled=true", "change the number"),
        (
            "sharding.shards=2,sharding.by=ordinals,workload=StatefulSet,sharding.replicas={2}",
            "needs sharding.by units",
        ),
        ("sharding.by=names", "by"),
        ("tls.enabled=true", "tls.existingSecret is required"),
        ("auth.enabled=true", "auth.existingSecret is required"),
        ("modelRepository.enabled=true", "modelRepository.existingClaim or"),
        ("cache.type=volumeClaimTemplate", "needs workload StatefulSet"),
        ("cache.type=existingClaim,cache.existingClaim=c,replicas=2", "the cache of one server"),
        ("cache.type=existingClaim,cache.existingClaim=c,sharding.shards=2", "the cache of one server"),
        ("extraContainers[0].name=x", "image"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, message: str) -> None:
    result = helm("template", "r", str(CHART), "--set", setting, check=False)
    assert result.returncode != 0
    assert message in result.stderr


def test_defaults_are_documented_and_known_to_the_schema() -> None:
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load(text)

    def compare(value: Any, node: dict[str, Any], path: str) -> None:
        if isinstance(value, dict) and "properties" in node:
            assert set(node["properties"]) - {"global"} >= set(value), path
            for key, child in value.items():
                compare(child, node["properties"][key], f"{path}.{key}")

    compare(defaults, schema, "")
    top = re.findall(r"(?m)^(\w+):", text)
    assert set(top) == set(schema["properties"]) - {"global"}
