"""How hub and engine run in ``deploy/compose.yaml`` and in ``deploy/kubernetes``."""

import json
import shutil
import subprocess
from typing import Any, NamedTuple

import yaml

from tests.deploy.images import ROOT, USER

COMPOSE = ROOT / "deploy" / "compose.yaml"
KUBERNETES = ROOT / "deploy" / "kubernetes"


class Container(NamedTuple):
    user: int
    arguments: list[str]
    volumes: dict[str, str]
    """What other containers may share: paths in the container, and the volume's name or its path on the machine."""

    @property
    def transfer_config(self) -> Any:
        return json.loads(self.arguments[self.arguments.index("--kv-transfer-config") + 1])

    @property
    def endpoint(self) -> str:
        """Where an engine looks for its hub."""
        endpoint: str = self.transfer_config["kv_connector_extra_config"]["blendhub"]["endpoint"]
        return endpoint


def of_compose() -> tuple[Container, Container]:
    """The hub and the engine."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    hub, engine = (
        Container(USER, service["command"], {volume["target"]: volume["source"] for volume in service["volumes"]})
        for service in (services["hub"], services["engine"])
    )
    return hub, engine


def resources() -> list[dict[str, Any]]:
    """The resources of the manifests: as Kustomize makes them where there is `kubectl`, otherwise as in the files."""
    if shutil.which("kubectl"):
        made = subprocess.run(["kubectl", "kustomize", KUBERNETES], capture_output=True, text=True, check=True).stdout
        return list(yaml.safe_load_all(made))
    names = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    return [one for name in names for one in yaml.safe_load_all((KUBERNETES / name).read_text())]


def pod_of(kind: str) -> dict[str, Any]:
    """The specification of the pods of the only resource of a kind."""
    (found,) = [one for one in resources() if one["kind"] == kind]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def of_kubernetes() -> tuple[Container, Container]:
    """The hub and the engine."""
    hub, engine = map(_container, (pod_of("DaemonSet"), pod_of("Deployment")))
    return hub, engine


def _container(pod: dict[str, Any]) -> Container:
    (only,) = pod["containers"]
    # All other volumes belong to their pod, whatever their names.
    of_node = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    mounts = [mount for mount in only["volumeMounts"] if mount["name"] in of_node]
    volumes = {mount["mountPath"]: of_node[mount["name"]] for mount in mounts}
    return Container(pod["securityContext"]["runAsUser"], only["args"], volumes)
