"""The Kubernetes manifests against the schemas that Kubernetes publishes; strictly: no unknown field passes."""

from __future__ import annotations

import kubernetes_validate
import pytest
import yaml

from tests.support.kubernetes import FOLDER, OVERLAYS, VERSIONS, Document, files, of_kind, rendered, written

# Custom resources, whose schemas come with what serves them.
CUSTOM = "keda.sh/v1alpha1"


def check(document: Document) -> None:
    for version in VERSIONS:
        assert kubernetes_validate.validate(document, version, strict=True) == version


@pytest.mark.parametrize(
    "document", [pytest.param(document, id=f"{name}:{document['kind']}") for name, document in written()]
)
def test_what_is_written_is_valid(document: Document) -> None:
    if document["apiVersion"] != CUSTOM:
        check(document)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_would_be_applied_is_valid(overlay: str) -> None:
    documents = rendered(overlay)
    assert len(documents) > 20
    for document in documents:
        if document["apiVersion"] != CUSTOM:
            check(document)
            assert document["metadata"]["labels"]["app.kubernetes.io/name"] == "spo"


def test_every_file_is_part_of_an_overlay() -> None:
    named: set[str] = set()
    for path in FOLDER.rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(path.read_text(encoding="utf-8"))
        entries = [
            *kustomization.get("resources", []),
            *(patch.get("path") for patch in kustomization.get("patches", [])),
        ]
        named |= {str((path.parent / entry).resolve()) for entry in entries if entry}
    assert {str(path.resolve()) for path in files()} <= named


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_are_unique_and_in_one_namespace(overlay: str) -> None:
    documents = rendered(overlay)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))
    assert set(of_kind(documents, "Namespace")) == {"spo"}
    assert all(document["metadata"]["namespace"] == "spo" for document in documents if document["kind"] != "Namespace")
