"""The manifests and the compose file against their published schemas, and against the images that they start."""

import re
import subprocess
import sys
from typing import Any

import pytest

from blendhub import PluginHost
from blendhub.system.served_vllm import FOR_CPUS, FOR_GPUS
from blendhub.vllm.transfer_config import check_transfer_config
from tests.deploy.deployment import (
    COMPOSE,
    DOCKERFILE,
    ROOT,
    USER,
    instructions,
    of_compose,
    of_kubernetes,
    resources,
)
from tests.prometheus import needs_prometheus, promtool

NO_SCHEMAS = "the schemas are not installed; `make setup` installs them"
DEPLOY = ROOT / "deploy"


def labelled(selector: dict[str, str]) -> list[dict[str, Any]]:
    """The templates of the pods that have these labels."""
    templates = [one["spec"]["template"] for one in resources().values() if "template" in one.get("spec", {})]
    return [template for template in templates if selector.items() <= template["metadata"]["labels"].items()]


def ports_of(template: dict[str, Any]) -> set[str]:
    return {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}


def test_each_resource_is_one_of_kubernetes():
    """The PodMonitor is the operator's: no schema of Kubernetes has it."""
    validator = pytest.importorskip("kubernetes_validate", reason=NO_SCHEMAS)
    for kind, resource in resources().items():
        if kind != "PodMonitor":
            validator.validate(resource, validator.latest_version(), strict=True)


def test_selectors_probes_and_the_monitor_name_labels_and_ports_that_pods_have():
    of_kind = resources()
    for kind in ("DaemonSet", "Deployment"):
        template = of_kind[kind]["spec"]["template"]
        assert labelled(of_kind[kind]["spec"]["selector"]["matchLabels"]) == [template]
        (container,) = template["spec"]["containers"]
        probes = [container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert set(probes) <= ports_of(template)
        assert container["resources"]["limits"]["memory"]
    (engine,) = labelled(of_kind["Service"]["spec"]["selector"])
    assert of_kind["Service"]["spec"]["ports"][0]["targetPort"] in ports_of(engine)
    monitor = of_kind["PodMonitor"]["spec"]
    (chosen,) = monitor["selector"]["matchExpressions"]
    watched = [template for value in chosen["values"] for template in labelled({chosen["key"]: value})]
    monitored = {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
    assert {port for template in watched for port in ports_of(template)} == monitored
    assert monitor["jobLabel"] == chosen["key"] and chosen["values"][0] == "blendhub", "the job that the alerts expect"


def test_the_compose_file_is_one():
    pytest.importorskip("check_jsonschema", reason=NO_SCHEMAS)
    command = ["check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml")]
    checked = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    for mount in (mount for service in COMPOSE["services"].values() for mount in service["volumes"]):
        source = mount["source"]
        assert source in COMPOSE["volumes"] if mount["type"] == "volume" else (DEPLOY / source).exists()


def test_hub_and_engine_share_their_user_one_volume_and_the_socket_in_it_and_the_hub_has_room_for_its_arena():
    (pod,) = resources()["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    asked, limit = (int(pod["resources"][bound]["memory"].removesuffix("Gi")) for bound in ("requests", "limits"))
    assert limit == asked, "it is used from the start"
    of_hub = int(COMPOSE["services"]["hub"]["mem_limit"].removesuffix("g"))
    layouts = [
        (of_kubernetes("DaemonSet"), of_kubernetes("Deployment"), limit),
        (of_compose("hub"), of_compose("engine"), of_hub),
    ]
    for hub, engine, memory in layouts:
        check_transfer_config(engine.transfer_config, PluginHost.discover(), None)
        assert [*dict(hub.volumes.items() & engine.volumes.items())] == ["/dev/shm"], "the only one that both mount"
        assert hub.user == engine.user == USER and engine.endpoint == layouts[0][1].endpoint
        arena = next(float(one.partition("=")[2]) for one in hub.arguments if one.startswith("--arena-gib="))
        assert memory >= arena + 2
    assert int(re.search(r"size=(\d+)g", COMPOSE["volumes"]["shared-memory"]["driver_opts"]["o"])[1]) > arena


def test_the_images_have_the_versions_that_readme_names_and_do_not_run_as_root():
    assert all(dict(instructions(target))["USER"] == f"{USER}:{USER}" for target in ("hub", "engine", "demo"))
    for version in re.findall(r"[\w-]+==[\d.]+", f"{FOR_GPUS} {FOR_CPUS}"):
        assert version in DOCKERFILE.read_text()


@needs_prometheus
def test_prometheus_reads_its_configuration_and_scrapes_ports_of_the_services():
    file = DEPLOY / "prometheus" / "prometheus.yml"
    checked = promtool("check", "config", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    targets = re.findall(r"(\w+):(\d+)", " ".join(re.findall(r'targets: \["(.*)"\]', file.read_text())))
    exposed = re.findall(r"^EXPOSE (\d+)", DOCKERFILE.read_text(), re.M)
    assert targets == list(zip(["hub", "engine"], exposed, strict=True))
    assert f'metrics = "0.0.0.0:{exposed[0]}"' in (DEPLOY / "hub.toml").read_text()
