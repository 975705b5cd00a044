"""The manifests and the compose file against their published schemas, and against the images that they start."""

import json
import re
from typing import Any

import pytest
import yaml

from blendhub import PluginHost
from blendhub.system.served_vllm import FOR_CPUS, FOR_GPUS
from blendhub.vllm.transfer_config import check_transfer_config
from harness.servers.prometheus import needs_prometheus, promtool
from tests.deploy.images import CONTAINERFILE, ROOT, USER, instructions
from tests.deploy.layouts import COMPOSE, Container, of_compose, of_kubernetes, pod_of, resources

NO_SCHEMAS = "the schemas are not installed; `make setup` installs them"
COMPOSE_SCHEMA = ROOT / "build" / "packages" / "compose" / "config" / "compose_spec.json"
DEPLOY = ROOT / "deploy"


def labelled(selector: dict[str, str]) -> list[dict[str, Any]]:
    """The templates of the pods that have these labels."""
    templates = [one["spec"]["template"] for one in resources() if "template" in one.get("spec", {})]
    return [template for template in templates if selector.items() <= template["metadata"]["labels"].items()]


def ports_of(template: dict[str, Any]) -> set[str]:
    return {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}


def test_each_resource_is_one_of_kubernetes():
    """The PodMonitor is the operator's: no schema of Kubernetes has it."""
    validator = pytest.importorskip("kubernetes_validate", reason=NO_SCHEMAS)
    for resource in resources():
        if resource["kind"] != "PodMonitor":
            validator.validate(resource, validator.latest_version(), strict=True)


def test_selectors_probes_and_the_monitor_name_labels_and_ports_that_pods_have():
    of_kind = {one["kind"]: one for one in resources()}
    for kind in ("DaemonSet", "Deployment"):
        assert labelled(of_kind[kind]["spec"]["selector"]["matchLabels"]) == [of_kind[kind]["spec"]["template"]]
        (container,) = pod_of(kind)["containers"]
        probes = [container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert set(probes) <= {port["name"] for port in container["ports"]}
        assert container["resources"]["limits"]["memory"]
    (engine,) = labelled(of_kind["Service"]["spec"]["selector"])
    assert of_kind["Service"]["spec"]["ports"][0]["targetPort"] in ports_of(engine)
    monitor = of_kind["PodMonitor"]["spec"]
    (chosen,) = monitor["selector"]["matchExpressions"]
    watched = [template for value in chosen["values"] for template in labelled({chosen["key"]: value})]
    assert {port for template in watched for port in ports_of(template)} == {
        endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]
    }
    assert monitor["jobLabel"] == chosen["key"] and chosen["values"][0] == "blendhub", "the job that the alerts expect"


def test_the_limit_of_the_hub_has_room_for_its_arena():
    (hub,) = pod_of("DaemonSet")["containers"]
    limit = int(hub["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert limit == int(hub["resources"]["requests"]["memory"].removesuffix("Gi")), "it is used from the start"
    assert limit >= arena_gib(of_kubernetes()[0]) + 2
    services, volumes = (yaml.safe_load(COMPOSE.read_text())[part] for part in ("services", "volumes"))
    arena = arena_gib(of_compose()[0])
    assert int(services["hub"]["mem_limit"].removesuffix("g")) >= arena + 2
    (size,) = re.findall(r"size=(\d+)g", volumes["shared-memory"]["driver_opts"]["o"])
    assert int(size) > arena


def arena_gib(hub: Container) -> float:
    return next(float(one.partition("=")[2]) for one in hub.arguments if one.startswith("--arena-gib="))


def test_the_compose_file_is_one():
    jsonschema = pytest.importorskip("jsonschema", reason=NO_SCHEMAS)
    if not COMPOSE_SCHEMA.exists():
        pytest.skip(NO_SCHEMAS)
    written = yaml.safe_load(COMPOSE.read_text())
    jsonschema.Draft201909Validator(json.loads(COMPOSE_SCHEMA.read_text())).validate(written)
    for mount in (mount for service in written["services"].values() for mount in service["volumes"]):
        source = mount["source"]
        assert source in written["volumes"] if mount["type"] == "volume" else (DEPLOY / source).exists()


def test_hub_and_engine_share_their_user_one_volume_and_the_socket_in_it():
    for hub, engine in (of_compose(), of_kubernetes()):
        check_transfer_config(engine.transfer_config, PluginHost.discover(), None)
        assert [*dict(hub.volumes.items() & engine.volumes.items())] == ["/dev/shm"], "the only one that both mount"
        assert hub.user == engine.user == USER
    assert of_compose()[1].endpoint == of_kubernetes()[1].endpoint


def test_the_images_have_the_versions_that_readme_names_and_do_not_run_as_root():
    assert all(dict(instructions(target))["USER"] == f"{USER}:{USER}" for target in ("hub", "engine"))
    for version in re.findall(r"[\w-]+==[\d.]+", f"{FOR_GPUS} {FOR_CPUS}"):
        assert version in CONTAINERFILE.read_text()


@needs_prometheus
def test_prometheus_reads_its_configuration_and_scrapes_ports_of_the_services():
    file = DEPLOY / "prometheus" / "prometheus.yml"
    checked = promtool("check", "config", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    targets = re.findall(r"(\w+):(\d+)", " ".join(re.findall(r'targets: \["(.*)"\]', file.read_text())))
    exposed = re.findall(r"^EXPOSE (\d+)", CONTAINERFILE.read_text(), re.M)
    assert targets == list(zip(["hub", "engine"], exposed, strict=True))
    assert f'metrics = "0.0.0.0:{exposed[0]}"' in (DEPLOY / "hub.toml").read_text()
