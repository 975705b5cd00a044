"""How the hub and an engine run in ``deploy/compose.yaml`` and in ``deploy/kubernetes``."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.deploy.images import ROOT, Image

COMPOSE = ROOT / "deploy" / "compose.yaml"
KUBERNETES = ROOT / "deploy" / "kubernetes"


class Container(NamedTuple):
    image: Image
    user: int
    arguments: list[str]
    volumes: dict[str, str]
    """What is mounted where: a path in the container, and the name or the path of the volume."""

    @property
    def endpoint(self) -> str:
        """Where an engine looks for its hub."""
        given = json.loads(self.arguments[self.arguments.index("--kv-transfer-config") + 1])
        endpoint: str = given["kv_connector_extra_config"]["blendhub"]["endpoint"]
        return endpoint


class Layout(NamedTuple):
    hub: Container
    engine: Container

    @property
    def shared(self) -> dict[str, str]:
        return dict(self.hub.volumes.items() & self.engine.volumes.items())


def of_compose() -> Layout:
    services = yaml.safe_load(COMPOSE.read_text())["services"]

    def container(name: str) -> Container:
        service, image = services[name], Image.of(services[name]["build"]["target"])
        volumes = {volume["target"]: volume["source"] for volume in service["volumes"]}
        return Container(image, int(service.get("user", image.user)), service["command"], volumes)

    return Layout(container("hub"), container("engine"))


def resources() -> list[dict[str, Any]]:
    """The resources of the manifests: as Kustomize makes them where there is `kubectl`, otherwise as in the files."""
    if shutil.which("kubectl"):
        made = subprocess.run(["kubectl", "kustomize", KUBERNETES], capture_output=True, text=True, check=True).stdout
        return list(yaml.safe_load_all(made))
    return [one for file in _resource_files() for one in yaml.safe_load_all(file.read_text())]


def _resource_files() -> Iterator[Path]:
    for name in yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]:
        yield KUBERNETES / name


def pod_of(kind: str) -> dict[str, Any]:
    """The specification of the pods of the only resource of a kind."""
    (found,) = [one for one in resources() if one["kind"] == kind]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def of_kubernetes() -> Layout:
    def container(kind: str, target: str) -> Container:
        pod = pod_of(kind)
        (only,) = pod["containers"]
        # All other volumes belong to their pod, whatever their names.
        of_node = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
        mounts = only["volumeMounts"]
        volumes = {mount["mountPath"]: of_node[mount["name"]] for mount in mounts if mount["name"] in of_node}
        return Container(Image.of(target), pod["securityContext"]["runAsUser"], only["args"], volumes)

    return Layout(container("DaemonSet", "hub"), container("Deployment", "engine"))
