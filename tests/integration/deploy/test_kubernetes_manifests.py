"""The Kubernetes manifests are valid, and fit one another, our configuration, our commands and our images."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import typer
import yaml

from common import health
from common.config import Config, differences
from generator import cli as generator
from learner import cli as learner
from relay import cli as relay
from sampler import cli as sampler
from sandbox_client import cli as sandbox
from tests.support import kubernetes as k8s

APPS = {
    "spo-sampler": sampler.app,
    "spo-generator": generator.app,
    "spo-learner": learner.app,
    "spo-relay": relay.app,
    "spo-sandbox": sandbox.app,
    "common.health": health.app,
    "learner.cli": learner.app,
}
Documents = list[k8s.Document]
PROJECT = tomllib.loads((k8s.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE = yaml.safe_load((k8s.ROOT / "compose.yaml").read_text(encoding="utf-8"))
CUSTOM = "keda.sh/v1alpha1"  # its schemas come with what serves them


@pytest.fixture(params=k8s.OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def documents(overlay: str) -> Documents:
    return k8s.rendered(overlay)


@pytest.fixture
def configs(overlay: str, documents: Documents) -> dict[str, Config]:
    processes = {name: k8s.environment(workload, documents) for name, workload in k8s.processes(documents)}
    return {name: k8s.configuration(overlay, environ) for name, environ in processes.items()}


@cache  # most documents are in several overlays
def check(text: str) -> None:
    """Strictly: no unknown field passes."""
    document = json.loads(text)
    for version in k8s.VERSIONS if document["apiVersion"] != CUSTOM else ():
        assert kubernetes_validate.validate(document, version, strict=True) == version


def test_what_is_written_is_valid_and_part_of_an_overlay() -> None:
    for _, document in k8s.written():
        check(json.dumps(document))
    named: set[str] = set()
    for path in k8s.FOLDER.rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(path.read_text(encoding="utf-8"))
        patches = [patch["path"] for patch in kustomization.get("patches", []) if "path" in patch]
        named |= {str((path.parent / entry).resolve()) for entry in [*kustomization.get("resources", []), *patches]}
    assert {str(path.resolve()) for path in k8s.files()} <= named


def test_what_would_be_applied_is_valid_and_in_one_namespace(documents: Documents) -> None:
    for document in documents:
        check(json.dumps(document))
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == "spo"
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names)) > 20
    assert set(k8s.of_kind(documents, "Namespace")) == {"spo"}


def test_each_process_reads_a_valid_configuration_and_all_agree(overlay: str, configs: dict[str, Config]) -> None:
    assert set(configs) - {"relay"} == {"sampler", "generator", "learner"}
    for name, config in configs.items():
        assert not differences(config, configs["sampler"].model_dump(mode="json", by_alias=True))
        assert config.broker.wait >= 300
        assert config.run.output_dir == "/runs"
        teachers = [one.url for one in config.teachers_in_use().values()]
        assert teachers == (["http://teacher:8000/v1"] if overlay == "taught" else [])
        if name in ("generator", "relay"):  # which find each other by their node
            assert (config.learner.weights.host, config.learner.weights.relay) == ("node-1", "auto")


def test_other_settings_of_ours_are_ones_that_our_code_reads(documents: Documents) -> None:
    names = {name for workload in k8s.workloads(documents).values() for name in k8s.environment(workload, documents)}
    ours = {name for name in names if name.startswith("SPO_") and not name.startswith("SPO__")}
    sources = [*(k8s.ROOT / "common").rglob("*.py"), *(k8s.ROOT / "docker").iterdir()]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.is_file())
    assert ours
    assert {name for name in ours if name not in text} == set()


@pytest.mark.parametrize(("overlay", "source"), [("cpu", "arithmetic"), ("gpu", "qwen3-8b-maths")])
def test_runs_are_the_ones_in_configs_but_for_their_places(overlay: str, source: str) -> None:
    def flat(tree: k8s.Document, prefix: str = "") -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in tree.items():
            values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        return values

    ours = flat(yaml.safe_load((k8s.FOLDER / "overlays" / overlay / "run.yaml").read_text(encoding="utf-8")))
    theirs = flat(yaml.safe_load((k8s.ROOT / "configs" / f"{source}.yaml").read_text(encoding="utf-8")))
    del ours["generator.max_concurrency"]  # the autoscaler divides by it, so here it is a number
    assert ours.keys() == theirs.keys()
    assert {key for key in ours if ours[key] != theirs[key]} == {"model.path", "data.train", "data.heldout"}


def expects(words: list[str]) -> None:
    """Check that our command takes these options."""
    assert words[0] in PROJECT["scripts"] or words[0] in APPS, words
    options = {option for parameter in typer.main.get_command(APPS[words[0]]).params for option in parameter.opts}
    assert {word for word in words[1:] if word.startswith("--")} <= options, words


def test_commands_and_probes_are_ours_and_take_their_options(documents: Documents) -> None:
    for name, workload in k8s.workloads(documents).items():
        words = k8s.command(workload)
        if words[0] == "torchrun":
            expects(words[words.index("--module") + 1 :])
        elif words[0] in PROJECT["scripts"]:
            expects(words)
        else:
            assert name in ("redis", "prepare", "tensorboard", "teacher"), words
        if name in ("sampler", "generator", "learner"):
            probe = k8s.container(workload)["readinessProbe"]["exec"]["command"]
            asked = " ".join(probe).partition("python -m ")[2].split()
            assert asked == ["common.health", name, "--config", k8s.RUN]
            expects(asked)
            assert name in health.HEARTBEATS
    for name, workload in k8s.processes(documents):  # none is killed because Redis is away
        for probe in ("livenessProbe", "startupProbe"):
            assert "exec" not in k8s.container(workload).get(probe, {}), name


def test_images_run_without_root_capabilities_or_an_account(documents: Documents) -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (k8s.ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE))
    for name, workload in k8s.workloads(documents).items():
        spec = k8s.pod(workload)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for each in [*spec["containers"], *spec.get("initContainers", [])]:
            image, _, tag = each["image"].partition(":")
            assert image.removeprefix("spo-").removesuffix("-gpu") in targets, name
            assert tag == PROJECT["version"]
            context = each["securityContext"]
            assert (context["allowPrivilegeEscalation"], context["capabilities"]) == (False, {"drop": ["ALL"]}), name


def test_each_role_gets_its_secrets_and_no_other(documents: Documents) -> None:
    for name, workload in k8s.workloads(documents).items():
        volumes = {volume["name"]: volume for volume in k8s.pod(workload)["volumes"]}
        secret = volumes.get("secrets", {}).get("secret")
        keys = {item["key"] for item in secret["items"]} if secret else set()
        # A relay is a client of the learner and a server of the generators.
        expected = set(COMPOSE["secrets"]) - {"sandbox_token"} if name == "relay" else None
        assert keys == (expected or set(COMPOSE["services"][name].get("secrets", []))), name


def test_files_that_are_named_are_mounted(documents: Documents, configs: dict[str, Config]) -> None:
    claims, maps = k8s.of_kind(documents, "PersistentVolumeClaim"), k8s.of_kind(documents, "ConfigMap")
    for name, workload in k8s.workloads(documents).items():
        volumes = {volume["name"]: volume for volume in k8s.pod(workload).get("volumes", [])}
        made = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        mounts = {mount["mountPath"]: mount for mount in k8s.container(workload)["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} == set(volumes) | made, name
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "data") in claims
            if "configMap" in volume:
                assert set(maps[volume["configMap"]["name"]]["data"]) == {"run.yaml"}
        words = [*k8s.environment(workload, documents).values(), *k8s.command(workload)]
        paths = {word for word in words if re.fullmatch(r"/[\w./-]+", word)}
        if name == "relay":
            # Of the settings of all it needs only the secrets: it keeps nothing on disk.
            paths = {path for path in paths if path.startswith(("/etc/run", "/run/secrets"))}
        elif name in configs:
            paths |= {configs[name].model.path, configs[name].data.train, str(configs[name].data.heldout)}
        for path in paths:
            assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts), f"{name}: {path}"


def test_addresses_lead_to_services_whose_pods_listen(documents: Documents, configs: dict[str, Config]) -> None:
    services = k8s.of_kind(documents, "Service")
    for name, service in services.items():
        labels = k8s.workloads(documents)[name]["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        ports = {port["name"]: port["containerPort"] for port in k8s.container(k8s.workloads(documents)[name])["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    weights = configs["learner"].learner.weights
    addresses = [(config.broker.url, "redis") for config in configs.values()]
    for url, service in [*addresses, (configs["generator"].sandbox.url, "sandbox"), (weights.advertise, "learner")]:
        parts = urlsplit(url or "")
        assert parts.hostname in (service, f"{service}-0.{service}")
        assert parts.port in {port["port"] for port in services[service]["spec"]["ports"]}
    assert weights.bind == f"tcp://0.0.0.0:{urlsplit(weights.advertise or '').port}"
    (port,) = services["sandbox"]["spec"]["ports"]
    defaults = {parameter.name: parameter.default for parameter in typer.main.get_command(sandbox.app).params}
    assert port["port"] == defaults["port"]


def test_the_learners_pods_are_counted_alike_everywhere(documents: Documents) -> None:
    job = k8s.workloads(documents)["learner"]
    pods = job["spec"]["completions"]
    assert (job["spec"]["completionMode"], job["spec"]["parallelism"]) == ("Indexed", pods)
    assert k8s.of_kind(documents, "PodDisruptionBudget")["learner"]["spec"]["minAvailable"] == pods
    words = k8s.command(job)
    if words[0] == "torchrun":
        options = dict(word.removeprefix("--").split("=") for word in words if "=" in word)
        assert int(options["nnodes"]) == pods
        assert int(options["nproc-per-node"]) == k8s.container(job)["resources"]["limits"]["nvidia.com/gpu"]
        assert int(options["shutdown-timeout"]) < k8s.pod(job)["terminationGracePeriodSeconds"]
    else:
        assert int(k8s.environment(job, documents)["WORLD_SIZE"]) == pods
