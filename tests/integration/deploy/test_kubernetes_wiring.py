"""What no schema sees: that the manifests fit one another, our configuration, our commands and our images."""

from __future__ import annotations

import re
import tomllib
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from common import health
from common.config import differences
from generator import cli as generator
from learner import cli as learner
from relay import cli as relay
from sampler import cli as sampler
from sandbox_client import cli as sandbox
from tests.support.kubernetes import (
    FOLDER,
    OVERLAYS,
    ROOT,
    RUN,
    Document,
    command,
    configuration,
    container,
    environment,
    of_kind,
    pod,
    processes,
    rendered,
    workloads,
)

APPS = {
    "spo-sampler": sampler.app,
    "spo-generator": generator.app,
    "spo-learner": learner.app,
    "spo-relay": relay.app,
    "spo-sandbox": sandbox.app,
    "common.health": health.app,
    "learner.cli": learner.app,
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def options(name: str) -> set[str]:
    return {option for parameter in typer.main.get_command(APPS[name]).params for option in parameter.opts}


def expects(words: list[str]) -> None:
    """Check that our command takes these options."""
    assert words[0] in PROJECT["scripts"] or words[0] in APPS, words
    unknown = {word for word in words[1:] if word.startswith("--")} - options(words[0])
    assert not unknown, f"{words[0]} has no {unknown}"


@every_overlay
def test_each_process_reads_a_valid_configuration_and_all_agree(overlay: str) -> None:
    documents = rendered(overlay)
    found = {name: configuration(overlay, environment(workload, documents)) for name, workload in processes(documents)}
    assert set(found) - {"relay"} == {"sampler", "generator", "learner"}
    for config in found.values():
        assert not differences(config, found["sampler"].model_dump(mode="json", by_alias=True))
        assert config.broker.wait >= 300
        assert config.run.output_dir == "/runs"


@every_overlay
def test_other_settings_of_ours_are_ones_that_our_code_reads(overlay: str) -> None:
    documents = rendered(overlay)
    ours = {
        name
        for workload in workloads(documents).values()
        for name in environment(workload, documents)
        if name.startswith("SPO_") and not name.startswith("SPO__")
    }
    sources = [*(ROOT / "common").rglob("*.py"), *(ROOT / "docker").iterdir()]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.is_file())
    assert ours
    assert {name for name in ours if name not in text} == set()


@pytest.mark.parametrize(
    ("overlay", "source", "own"),
    [
        ("cpu", "arithmetic", {"model.path", "data.train", "data.heldout"}),
        ("gpu", "qwen3-8b-maths", {"model.path", "data.train", "data.heldout"}),
    ],
)
def test_runs_are_the_ones_in_configs_but_for_their_places(overlay: str, source: str, own: set[str]) -> None:
    def flat(tree: Document, prefix: str = "") -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in tree.items():
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        return found

    ours = flat(yaml.safe_load((FOLDER / "overlays" / overlay / "run.yaml").read_text(encoding="utf-8")))
    theirs = flat(yaml.safe_load((ROOT / "configs" / f"{source}.yaml").read_text(encoding="utf-8")))
    assert ours.keys() == theirs.keys()
    assert {key for key in ours if ours[key] != theirs[key]} == own


@every_overlay
def test_commands_and_probes_are_ours_and_take_their_options(overlay: str) -> None:
    documents = rendered(overlay)
    for name, workload in workloads(documents).items():
        words = command(workload)
        if words[0] == "torchrun":
            expects(words[words.index("--module") + 1 :])
        elif words[0] in PROJECT["scripts"]:
            expects(words)
        else:
            assert name in ("redis", "prepare", "tensorboard"), words
        probe = container(workload).get("readinessProbe", {}).get("exec", {}).get("command", [])
        asked = " ".join(probe).partition("python -m ")[2].split()
        if name in ("sampler", "generator", "learner"):
            assert asked[:2] == ["common.health", name]
            assert asked[2:] == ["--config", RUN]
            expects(asked)
            assert name in health.HEARTBEATS


@every_overlay
def test_no_process_is_killed_because_redis_is_away(overlay: str) -> None:
    for name, workload in processes(rendered(overlay)):
        probes = container(workload)
        assert "exec" not in probes.get("livenessProbe", {}), name
        assert "exec" not in probes.get("startupProbe", {}), name


@every_overlay
def test_images_are_targets_of_the_dockerfile_in_this_release(overlay: str) -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE))
    for name, workload in workloads(rendered(overlay)).items():
        for found in [*pod(workload)["containers"], *pod(workload).get("initContainers", [])]:
            image, _, tag = found["image"].partition(":")
            assert image.removeprefix("spo-").removesuffix("-gpu") in targets, name
            assert tag == PROJECT["version"]


@every_overlay
def test_each_role_gets_the_secrets_it_has_under_compose_and_no_other(overlay: str) -> None:
    documents = rendered(overlay)
    for name, workload in workloads(documents).items():
        volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
        secret = volumes.get("secrets", {}).get("secret")
        keys = {item["key"] for item in secret["items"]} if secret else set()
        if name == "relay":
            # A client of the learner and a server of the generators.
            assert keys == set(COMPOSE["secrets"]) - {"sandbox_token"}
            continue
        assert keys == set(COMPOSE["services"][name].get("secrets", [])), name


@every_overlay
def test_files_that_are_named_are_mounted(overlay: str) -> None:
    documents = rendered(overlay)
    claims, maps = of_kind(documents, "PersistentVolumeClaim"), of_kind(documents, "ConfigMap")
    for name, workload in workloads(documents).items():
        volumes = {volume["name"]: volume for volume in pod(workload).get("volumes", [])}
        made = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        mounts = {mount["mountPath"]: mount for mount in container(workload)["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} == set(volumes) | made, name
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "data") in claims
            if "configMap" in volume:
                assert set(maps[volume["configMap"]["name"]]["data"]) == {"run.yaml"}
        told = [*environment(workload, documents).values(), *command(workload)]
        paths = {word for word in told if re.fullmatch(r"/[\w./-]+", word)}
        if RUN in told and name != "relay":
            config = configuration(overlay, environment(workload, documents))
            paths |= {config.model.path, config.data.train, str(config.data.heldout)}
        elif name == "relay":
            # Of the settings of all it needs only the secrets: it keeps nothing on disk.
            paths = {path for path in paths if path.startswith(("/etc/run", "/run/secrets"))}
        for path in paths:
            assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts), f"{name}: {path}"


@every_overlay
def test_addresses_lead_to_services_and_from_there_to_pods_that_listen(overlay: str) -> None:
    documents = rendered(overlay)
    services = of_kind(documents, "Service")
    for name, service in services.items():
        labels = workloads(documents)[name]["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        ports = {port["name"]: port["containerPort"] for port in container(workloads(documents)[name])["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]

    def leads(url: str | None, service: str) -> None:
        assert url is not None
        parts = urlsplit(url)
        assert parts.hostname in (service, f"{service}-0.{service}")
        assert parts.port in {port["port"] for port in services[service]["spec"]["ports"]}

    configs = {
        name: configuration(overlay, environment(workload, documents)) for name, workload in processes(documents)
    }
    for config in configs.values():
        leads(config.broker.url, "redis")
    leads(configs["generator"].sandbox.url, "sandbox")
    weights = configs["learner"].learner.weights
    leads(weights.advertise, "learner")
    assert weights.bind == f"tcp://0.0.0.0:{urlsplit(weights.advertise or '').port}"
    (port,) = services["sandbox"]["spec"]["ports"]
    assert port["port"] == next(
        parameter.default for parameter in typer.main.get_command(sandbox.app).params if parameter.name == "port"
    )


@every_overlay
def test_the_learners_pods_are_counted_alike_everywhere(overlay: str) -> None:
    documents = rendered(overlay)
    job = workloads(documents)["learner"]
    pods = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == pods
    assert of_kind(documents, "PodDisruptionBudget")["learner"]["spec"]["minAvailable"] == pods
    words = command(job)
    if words[0] == "torchrun":
        given = dict(word.removeprefix("--").split("=") for word in words if "=" in word)
        assert int(given["nnodes"]) == pods
        assert int(given["nproc-per-node"]) == container(job)["resources"]["limits"]["nvidia.com/gpu"]
        assert int(given["shutdown-timeout"]) < pod(job)["terminationGracePeriodSeconds"]
    else:
        assert int(environment(job, documents)["WORLD_SIZE"]) == pods


@every_overlay
def test_no_container_runs_as_root_or_with_capabilities_or_an_account(overlay: str) -> None:
    for name, workload in workloads(rendered(overlay)).items():
        spec = pod(workload)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for each in [*spec["containers"], *spec.get("initContainers", [])]:
            context = each["securityContext"]
            assert (context["allowPrivilegeEscalation"], context["capabilities"]) == (False, {"drop": ["ALL"]}), name


@every_overlay
def test_relays_and_generators_find_each_other_by_their_node(overlay: str) -> None:
    documents = rendered(overlay)
    for name, workload in processes(documents):
        if name in ("generator", "relay"):
            config = configuration(overlay, environment(workload, documents))
            assert config.learner.weights.host == "node-1"
            assert config.learner.weights.relay == "auto"
