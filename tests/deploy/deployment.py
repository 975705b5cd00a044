"""What ``deploy/Dockerfile`` says, and how ``compose.yaml`` and the manifests of Kubernetes run hub and engine."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
KUBERNETES = ROOT / "deploy" / "kubernetes"
USER = 10001


def instructions(target: str) -> list[tuple[str, str]]:
    """The instructions of a stage of the Dockerfile, after those of the stages that it is made from."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    made: dict[str, list[tuple[str, str]]] = {}
    for word, _, rest in (line.partition(" ") for line in filter(None, text.splitlines())):
        if word == "FROM":
            base, name = rest.split(" AS ")
            made[name] = list(made.get(base, []))
        else:
            made[name].append((word, rest.strip()))
    return made[target]


def entrypoint(target: str) -> Any:
    return json.loads(dict(instructions(target))["ENTRYPOINT"])


def variables_of(target: str) -> dict[str, str]:
    settings = " ".join(rest for word, rest in instructions(target) if word == "ENV")
    return dict(setting.split("=", 1) for setting in settings.split())


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


def of_compose(service: str) -> Container:
    told = COMPOSE["services"][service]
    return Container(USER, told["command"], {volume["target"]: volume["source"] for volume in told["volumes"]})


def resources() -> dict[str, Any]:
    """The manifests' resources by their kinds, of which each is there once."""
    names = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    made = [resource for name in names for resource in yaml.safe_load_all((KUBERNETES / name).read_text())]
    by_kind = {resource["kind"]: resource for resource in made}
    assert len(by_kind) == len(made)
    return by_kind


def of_kubernetes(kind: str) -> Container:
    pod = resources()[kind]["spec"]["template"]["spec"]
    (only,) = pod["containers"]
    # All other volumes belong to their pod, whatever their names.
    of_node = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    mounts = [mount for mount in only["volumeMounts"] if mount["name"] in of_node]
    volumes = {mount["mountPath"]: of_node[mount["name"]] for mount in mounts}
    return Container(pod["securityContext"]["runAsUser"], only["args"], volumes)
